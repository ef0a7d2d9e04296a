#include "engine/connection.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "common/passing.h"
#include "common/system_error.h"

namespace paceline {
namespace {

// Fairness between connections: after so many bytes the others get a turn.
constexpr size_t kMostBytesATurn = 1 << 20;

// Payload up to this size travels in the frame itself, also where memory is shared.
constexpr uint64_t kInlineBytes = 8 << 10;

// How often a stream's share of the kernel is fitted to its rate.
constexpr auto kLimitEvery = std::chrono::milliseconds(100);

constexpr const char* kLied = "counts bytes that were never sent";
constexpr const char* kClosed = "closed its connection: its process died";

std::string broke(int error) {
  std::string text = std::string("broke its connection: ") + std::strerror(error);
  switch (error) {
    case ECONNRESET:
    case EPIPE:
      return text + ": its process died";
    case ETIMEDOUT:
    case EHOSTUNREACH:
    case ENETUNREACH:
      return std::string("cannot be reached: ") + std::strerror(error) + ": its host or the network between is down";
    default:
      return text;
  }
}

}  // namespace

Connection::Connection(Poller& poller, FrameHandler& handler, const Transport& transport, std::unique_ptr<Rings> rings,
                       Fd fd, uint32_t peer, Lane lane)
    : poller_(poller),
      handler_(handler),
      transport_(transport),
      fd_(std::move(fd)),
      peer_(peer),
      lane_(lane),
      rings_(std::move(rings)) {
  if (rings_ != nullptr) {
    pulls_ = std::make_unique<Pulls>(fd_.get());
    FrameHeader header;
    header.type = FrameType::kRings;
    header.id = 1;
    header.seq = pulls_->word();
    header.offset = pulls_->address();
    enqueue_control(header);
  }
  watched_ = EPOLLIN | EPOLLRDHUP;
  poller_.add(fd_.get(), watched_, this);
}

Connection::~Connection() {
  if (fd_) poller_.remove(fd_.get());
  poller_.remove_memory(this);
}

void Connection::enqueue_raw(std::vector<uint8_t> bytes) { raw_ = std::move(bytes); }

void Connection::enqueue(OutFrame frame) { insert(out_.end(), std::move(frame)); }

void Connection::enqueue_urgent(OutFrame frame) {
  const auto begun = out_.begin() + static_cast<std::ptrdiff_t>(num_begun());
  insert(std::find_if(begun, out_.end(), [](const OutFrame& waiting) { return waiting.owner != nullptr; }),
         std::move(frame));
}

void Connection::enqueue_urgent(const FrameHeader& header) {
  OutFrame frame;
  frame.header = header;
  enqueue_urgent(std::move(frame));
}

void Connection::insert(const std::deque<OutFrame>::iterator& before, OutFrame frame) {
  if (finishing_ || broken_) return;
  frame.header.shared = rings_ != nullptr && frame.owner != nullptr && frame.header.length > kInlineBytes;
  if (frame.payload == nullptr) frame.payload = frame.owned.data();
  encode(frame.header, frame.encoded);
  const size_t bytes = frame.queued_bytes();
  out_.insert(before, std::move(frame));
  out_bytes_ += bytes;
}

// Frames of which the peer has, or is just being given, the first byte: more than one while the handler hears of them.
size_t Connection::num_begun() const {
  size_t begun = 0;
  for (size_t written = front_written_; written > 0; ++begun) written -= std::min(written, out_[begun].wire_bytes());
  return begun;
}

void Connection::enqueue_control(const FrameHeader& header) {
  OutFrame frame;
  frame.header = header;
  enqueue(std::move(frame));
}

void Connection::on_event(uint32_t events) {
  if (broken_) return;
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR | EPOLLRDHUP)) != 0) {
    if (reads_stream_ && !finishing_) hear_ringing();
    if (paused_ && !finishing_ && (events & (EPOLLHUP | EPOLLERR | EPOLLRDHUP)) != 0) drain();
    read_on();
  }
  if (!broken_ && (events & EPOLLOUT) != 0) {
    flush();
    handler_.on_flushed();
  }
  settle();
}

void Connection::read_on() {
  if (finishing_) return discard();
  size_t turn = 0;
  for (size_t got = 1; got > 0 && turn < kMostBytesATurn && !broken_ && !paused_; turn += got) {
    if (turn > 0 && poller_.others_wait()) break;
    got = read_some();
    // To ask for more would be a call for nothing; epoll, or a look at the stream, says when there is some.
    if (drained_ && !hung_up_ && !ended_) break;
  }
}

// Both sides go on where one of them had waited for room in a ring.
void Connection::settle() {
  if (broken_) return;
  if (finishing_) return flush();
  const bool peer_waits = rings_ != nullptr && rings_->is_open() && rings_->peer_waits();
  if (peer_waits && writes_stream_) ring();
  if (peer_waits && !writes_stream_) {
    FrameHeader room;
    room.type = FrameType::kRoom;
    enqueue_urgent(room);  // before what waits for room itself
    go_on_ = true;
  }
  if (std::exchange(go_on_, false)) flush();
}

// Reads the rest of the payload to where it belongs and, behind it, the next headers. Returns how many bytes there
// were, 0 to stop.
size_t Connection::read_some() {
  std::array<iovec, 2> parts{};
  size_t count = 0;
  if (in_frame_ && to_go_ > 0) parts[count++] = {to_, to_go_};
  if (ahead_begin_ == ahead_end_) ahead_begin_ = ahead_end_ = 0;
  parts[count++] = {ahead_.data() + ahead_end_, ahead_.size() - ahead_end_};
  const ssize_t got = receive(std::span(parts).first(count));
  if (reads_stream_ && stream_->lied_to()) {
    broken(kLied);
    return 0;
  }
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
  if (got <= 0) {
    // A Unix socket is reset when its peer closes it and has not read everything.
    const bool closed = got == 0 || (errno == ECONNRESET && rings_ != nullptr);
    broken(closed ? kClosed : broke(errno));
    return 0;
  }
  size_t left = static_cast<size_t>(got);
  drained_ = left < parts[0].iov_len + parts[1].iov_len;
  if (count == 2) {
    const size_t placed = std::min<size_t>(left, to_go_);
    to_ += placed;
    to_go_ -= placed;
    left -= placed;
  }
  ahead_end_ += left;  // first: what the frame leads to may read on
  if (count == 2 && to_go_ == 0) take_bytes();
  return parse() ? static_cast<size_t>(got) : 0;
}

// Bytes, and the segment that a peer of the same host passes with them. 0 at the end.
ssize_t Connection::receive(std::span<iovec> parts) {
  if (reads_stream_) {
    const size_t got = stream_->read(parts);
    errno = EAGAIN;
    return got == 0 && !ended_ ? -1 : static_cast<ssize_t>(got);
  }
  if (rings_ == nullptr || rings_->is_open()) return ::readv(fd_.get(), parts.data(), static_cast<int>(parts.size()));
  return receive_with_file(fd_.get(), parts, &passed_, &lost_file_);
}

// The streamed payload is complete.
void Connection::take_bytes() {
  in_frame_ = false;
  const FrameHeader header = header_;  // what the frame leads to may read on
  handler_.on_frame(*this, header, nullptr);
}

// Takes headers and payload from the bytes read ahead. False when reading must stop.
bool Connection::parse() {
  while (!broken_ && !finishing_ && !paused_ && !in_frame_ && ahead_end_ - ahead_begin_ >= kFrameHeaderBytes) {
    const std::span<const uint8_t, kFrameHeaderBytes> bytes(ahead_.data() + ahead_begin_, kFrameHeaderBytes);
    FrameHeader header;
    const bool known = decode(bytes, &header);
    const bool about_rings = header.type >= FrameType::kRings && header.type <= FrameType::kStream;
    const bool needs_rings = header.shared || header.type == FrameType::kAt;
    if (!known || (needs_rings && (rings_ == nullptr || !rings_->is_open()))) {
      broken("sent bytes that are no frame");
      return false;
    }
    ahead_begin_ += kFrameHeaderBytes;
    if (about_rings) {
      if (!control_rings(header)) {
        // The fault is this rank's own: all hear of it, this peer too, which would take a mere end for a death.
        if (lost_file_) handler_.on_exception(kOutOfFiles);
        if (finishing_) return false;
        broken(rings_ == nullptr ? "shares memory, and its peer has none to share (a warning there says why)"
                                 : "shares memory in a way that makes no sense");
      }
      continue;
    }
    header_ = header;
    to_ = nullptr;
    const FrameHandler::Verdict verdict = handler_.on_header(*this, header_, &to_);
    if (broken_ || finishing_) return false;
    if (verdict == FrameHandler::Verdict::kPause) {
      ahead_begin_ -= kFrameHeaderBytes;
      paused_ = true;
      watch();
      return false;
    }
    if (header_.shared) {
      take_shared();
      continue;
    }
    to_go_ = header_.streamed_bytes();
    if (to_go_ > 0 && to_ == nullptr) {
      broken("sent bytes that nobody asked for");
      return false;
    }
    in_frame_ = true;
    const size_t here = std::min<size_t>(to_go_, ahead_end_ - ahead_begin_);
    if (here > 0 && to_ != nullptr) {
      std::memcpy(to_, ahead_.data() + ahead_begin_, here);
      ahead_begin_ += here;
      to_ += here;
      to_go_ -= here;
    }
    if (to_go_ == 0) take_bytes();
  }
  if (broken_ || finishing_) return false;
  if (ahead_begin_ > 0 && ahead_begin_ < ahead_end_) {
    std::memmove(ahead_.data(), ahead_.data() + ahead_begin_, ahead_end_ - ahead_begin_);
    ahead_end_ -= ahead_begin_;
    ahead_begin_ = 0;
  }
  return !paused_;
}

void Connection::resume() {
  if (!paused_ || broken_) return;
  paused_ = false;
  watch();
  if (parse()) read_on();  // ringing is left for who sleeps
  settle();
}

void Connection::drain() {
  hung_up_ = true;
  resume();
}

void Connection::flush() {
  if (broken_) return;
  socket_full_ = ring_full_ = stream_full_ = interrupted_ = false;
  let_go_of_written();  // where an exception had kept us from doing so
  for (size_t turn = 0, sent = 1; sent > 0; turn += sent) {
    if (!finishing_ && has_room()) handler_.on_room(*this);
    if (broken_ || (out_.empty() && raw_.empty())) break;
    if (turn >= kMostBytesATurn) {  // goes on in the next turn: a reader that keeps up would keep us here till the end
      socket_full_ = true;          // so that whoever sleeps is told that there is room
      interrupted_ = writes_stream_;
      break;
    }
    sent = write_some();
  }
  if (broken_) return;
  watch();
  if (finishing_ && out_.empty() && raw_.empty() && !finished_) {
    finished_ = true;
    ::shutdown(fd_.get(), SHUT_WR);
  }
}

// What the next sendmsg carries. Payload goes to the ring just before its header, and the header at once: the peer
// works on it while the next piece is copied.
size_t Connection::collect(std::span<iovec> parts) {
  size_t count = 0;
  size_t skip = front_written_;
  for (size_t i = 0; i < out_.size() && count + 2 <= parts.size(); ++i) {
    OutFrame& frame = out_[i];
    const bool copies = frame.header.shared && !frame.in_ring;
    if (copies && !rings_->put(frame.payload, frame.header.length)) break;
    frame.in_ring = frame.in_ring || copies;
    if (skip < kFrameHeaderBytes) parts[count++] = {frame.encoded.data() + skip, kFrameHeaderBytes - skip};
    const size_t payload = frame.header.streamed_bytes();
    const size_t in_payload = skip > kFrameHeaderBytes ? skip - kFrameHeaderBytes : 0;
    if (payload > in_payload) {
      parts[count++] = {const_cast<uint8_t*>(frame.payload) + in_payload, payload - in_payload};
    }
    skip = 0;
    // A segment is passed with its own frame alone, and behind the frame that says so all go through memory.
    if (copies || frame.header.type == FrameType::kRings || frame.header.type == FrameType::kStream) break;
  }
  return count;
}

ssize_t Connection::send(std::span<iovec> parts) {
  if (!writes_stream_) {
    // This side's segment goes with the frame that announces it.
    const bool announces = raw_.empty() && front_written_ == 0 && out_.front().header.type == FrameType::kRings;
    return send_with_file(fd_.get(), parts, announces ? rings_->fd() : -1, MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  size_t sent = stream_->write(parts);
  if (sent == 0) {
    rings_->wait_for_room();
    sent = stream_->write(parts);
  }
  if (stream_->finds_sleeper() && !poller_.rings_later(this)) ring();
  return static_cast<ssize_t>(sent);
}

// As many frames as fit. Returns how many bytes that were, 0 when no more can go now.
size_t Connection::write_some() {
  std::array<iovec, 64> parts;  // of which `count` are set
  size_t count = 1;
  parts[0] = {raw_.data(), raw_.size()};
  if (raw_.empty()) count = collect(parts);
  const ssize_t sent = count > 0 ? send(std::span(parts).first(count)) : 0;
  if (sent == 0) {
    (count == 0 ? ring_full_ : stream_full_) = true;
    if (rings_->lied_to() || (stream_ && stream_->lied_to())) broken(kLied);
    return 0;
  }
  if (sent < 0) {
    socket_full_ = errno == EAGAIN || errno == EINTR;
    if (socket_full_) {
      full();
      return 0;
    }
    hear_out(broke(errno));
    return 0;
  }
  blocked_since_ = Clock::time_point::max();
  auto left = static_cast<size_t>(sent);
  const size_t raw = std::min(left, raw_.size());
  raw_.erase(raw_.begin(), raw_.begin() + static_cast<std::ptrdiff_t>(raw));
  left -= raw;
  front_written_ += left;
  const size_t queued = out_bytes_;
  let_go_of_written();
  const size_t payload = queued > out_bytes_ ? queued - out_bytes_ : 0;  // more than was sent where it is in a ring
  return broken_ ? 0 : std::max(static_cast<size_t>(sent), payload);
}

void Connection::let_go_of_written() {
  while (!broken_ && !out_.empty() && front_written_ >= out_.front().wire_bytes()) {
    const OutFrame frame = std::move(out_.front());
    front_written_ -= frame.wire_bytes();
    out_bytes_ -= frame.queued_bytes();
    out_.pop_front();
    if (frame.header.type == FrameType::kRings) rings_->forget_fd();
    if (frame.header.type == FrameType::kStream) writes_stream_ = true;
    if (!finishing_) handler_.on_sent(*this, frame);
  }
}

// The kernel takes no more for now.
void Connection::full() {
  if (blocked_since_ != Clock::time_point::max()) return;
  blocked_since_ = Clock::now();
  if (blocked_since_ < limited_at_ + kLimitEvery) return;
  limited_at_ = blocked_since_;
  most_bytes_ = transport_.limit_unsent(fd_.get());
}

// Gives up the frames with borrowed payload that meet a condition. One that was begun must be finished, or nothing
// behind it can be read: its bytes may go away, so they are copied.
template <typename Condition>
void Connection::take_back(const Condition& condition) {
  const size_t begun = num_begun();
  std::deque<OutFrame> kept;
  for (size_t i = 0; i < out_.size(); ++i) {
    OutFrame& frame = out_[i];
    const bool goes = frame.owner != nullptr && condition(frame);
    if (goes && i >= begun) {
      out_bytes_ -= frame.queued_bytes();
      continue;
    }
    const size_t payload = frame.header.streamed_bytes();
    if (goes && payload > 0) {
      frame.owned.assign(frame.payload, frame.payload + payload);
      frame.payload = frame.owned.data();
    }
    kept.push_back(std::move(frame));
  }
  out_ = std::move(kept);
}

void Connection::abandon(const void* owner, uint64_t seq) {
  if (finishing_ || broken_) return;
  take_back([owner](const OutFrame& frame) { return frame.owner == owner; });
  if (!in_frame_ || header_.type != FrameType::kData || header_.seq != seq) return;
  nowhere_.resize(to_go_);
  to_ = nowhere_.data();
}

void Connection::finish() {
  if (finishing_ || broken_) return;
  take_back([](const OutFrame&) { return true; });
  finishing_ = true;
  flush();
  if (rings_ != nullptr) rings_->close();  // after the reason was told, and before anybody takes back what he has lent
  if (!broken_) watch();
}

void Connection::look_for_life(std::chrono::seconds timeout, Clock::time_point now) {
  if (!broken_ && liveness_.lost(transport_, fd_.get(), timeout, now)) broken(lost_host(timeout));
}

// After the end: what still arrives is read and dropped, so that closing does not reset what we have sent.
void Connection::discard() {
  std::array<uint8_t, 65536> trash;
  if (reads_stream_) {
    const iovec all{trash.data(), trash.size()};
    stream_->read(std::span(&all, 1));
    if (writes_stream_ && rings_->peer_waits()) ring();
    if (stream_->lied_to()) return broken(kLied);
  }
  for (int i = 0; i < 64; ++i) {
    const ssize_t got = ::read(fd_.get(), trash.data(), trash.size());
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) {
      broken(kClosed);
      return;
    }
  }
}

void Connection::watch() {
  const bool deaf = paused_ && !finishing_ && !reads_stream_;  // where there is a stream, the socket only rings
  const uint32_t events =
      EPOLLRDHUP | (deaf ? 0u : static_cast<uint32_t>(EPOLLIN)) | (socket_full_ ? static_cast<uint32_t>(EPOLLOUT) : 0u);
  if (events == watched_) return;
  watched_ = events;
  poller_.change(fd_.get(), events, this);
}

bool Connection::pull(uint64_t address, uint8_t* to, uint64_t length) {
  const int error = pulls_->read(address, to, length);
  if (error == 0) return !rings_->peer_closed();  // asked afterwards: until then it was true
  hear_out(error == ESRCH ? kClosed : std::string("lends memory that cannot be read: ") + std::strerror(error));
  return false;
}

// The peer may have said why before it closed: read that first, unless nobody listens any more.
void Connection::hear_out(const std::string& reason) {
  while (!broken_ && !paused_ && !finishing_ && read_some() > 0) {
  }
  if (!broken_) broken(reason);
}

void Connection::broken(const std::string& reason) {
  if (broken_) return;
  broken_ = true;
  poller_.remove(fd_.get());
  poller_.remove_memory(this);
  fd_.reset();
  handler_.on_broken(*this, reason);
}

}  // namespace paceline
