#include "engine/connection.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace paceline {
namespace {

// Fairness between connections: after so many bytes the others get a turn.
constexpr size_t kMostBytesATurn = 4 << 20;

}  // namespace

Connection::Connection(Poller& poller, FrameHandler& handler, const Transport& transport, Fd fd, uint32_t peer,
                       Lane lane)
    : poller_(poller),
      handler_(handler),
      transport_(transport),
      fd_(std::move(fd)),
      peer_(peer),
      lane_(lane),
      process_(transport.pullable_process(fd_.get())) {
  watched_ = EPOLLIN | EPOLLRDHUP;
  poller_.add(fd_.get(), watched_, this);
}

Connection::~Connection() {
  if (fd_) poller_.remove(fd_.get());
}

void Connection::enqueue_raw(std::vector<uint8_t> bytes) { raw_ = std::move(bytes); }

void Connection::enqueue(OutFrame frame) {
  if (finishing_ || broken_) return;
  headers_.emplace_back();
  encode(frame.header, headers_.back());
  if (frame.payload == nullptr) frame.payload = frame.owned.data();
  out_bytes_ += frame.header.has_payload() ? frame.header.length : 0;
  out_.push_back(std::move(frame));
  if (out_.back().owned.data() != nullptr) out_.back().payload = out_.back().owned.data();
}

void Connection::enqueue_control(const FrameHeader& header) {
  OutFrame frame;
  frame.header = header;
  enqueue(std::move(frame));
}

void Connection::on_event(uint32_t events) {
  if (broken_) return;
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR | EPOLLRDHUP)) != 0) {
    if (finished_ || finishing_) {
      discard();
    } else {
      if (paused_ && (events & (EPOLLHUP | EPOLLERR | EPOLLRDHUP)) != 0) drain();
      size_t turn = 0;
      for (size_t got = 1; got > 0 && turn < kMostBytesATurn && !broken_ && !paused_; turn += got) got = read_some();
    }
  }
  if (!broken_ && (events & EPOLLOUT) != 0) {
    flush();
    handler_.on_flushed();
  }
}

// Reads the rest of the payload to where it belongs and, behind it, the next headers. Returns how many bytes there
// were, 0 to stop.
size_t Connection::read_some() {
  std::array<iovec, 2> parts{};
  size_t count = 0;
  if (in_frame_ && to_go_ > 0) parts[count++] = {to_, to_go_};
  if (ahead_begin_ == ahead_end_) ahead_begin_ = ahead_end_ = 0;
  parts[count++] = {ahead_.data() + ahead_end_, ahead_.size() - ahead_end_};
  const ssize_t got = ::readv(fd_.get(), parts.data(), static_cast<int>(count));
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
  if (got <= 0) {
    broken(got == 0 ? "closed its connection" : std::string("broke its connection: ") + std::strerror(errno));
    return 0;
  }
  size_t left = static_cast<size_t>(got);
  if (count == 2) {
    const size_t placed = std::min<size_t>(left, to_go_);
    to_ += placed;
    to_go_ -= placed;
    left -= placed;
  }
  ahead_end_ += left;  // first: what the frame leads to may read on
  if (count == 2 && to_go_ == 0) complete_payload();
  return parse() ? static_cast<size_t>(got) : 0;
}

void Connection::complete_payload() {
  in_frame_ = false;
  handler_.on_frame(*this, header_);
}

// Takes headers and payload from the bytes read ahead. False when reading must stop.
bool Connection::parse() {
  while (!broken_ && !finishing_ && !paused_ && !in_frame_ && ahead_end_ - ahead_begin_ >= kFrameHeaderBytes) {
    const std::span<const uint8_t, kFrameHeaderBytes> bytes(ahead_.data() + ahead_begin_, kFrameHeaderBytes);
    if (!decode(bytes, &header_)) {
      broken("sent bytes that are no frame");
      return false;
    }
    ahead_begin_ += kFrameHeaderBytes;
    to_ = nullptr;
    to_go_ = header_.has_payload() ? header_.length : 0;
    const FrameHandler::Verdict verdict = handler_.on_header(*this, header_, &to_);
    if (broken_ || finishing_) return false;
    if (verdict == FrameHandler::Verdict::kPause) {
      ahead_begin_ -= kFrameHeaderBytes;
      paused_ = true;
      watch();
      return false;
    }
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
    if (to_go_ == 0) complete_payload();
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
  if (parse()) on_event(EPOLLIN);
}

void Connection::drain() {
  hung_up_ = true;
  resume();
}

void Connection::flush() {
  if (broken_) return;
  for (;;) {
    if (!finishing_ && has_room()) handler_.on_room(*this);
    if (broken_ || (out_.empty() && raw_.empty())) break;
    if (!write_some()) break;
  }
  if (broken_) return;
  const bool wants = !out_.empty() || !raw_.empty();
  if (wants != wants_write_) {
    wants_write_ = wants;
    watch();
  }
  if (finishing_ && !wants && !finished_) {
    finished_ = true;
    ::shutdown(fd_.get(), SHUT_WR);
  }
}

// One sendmsg of as many frames as fit. False when the kernel takes no more.
bool Connection::write_some() {
  std::array<iovec, 64> parts{};
  size_t count = 0;
  if (!raw_.empty()) parts[count++] = {raw_.data(), raw_.size()};
  size_t skip = front_written_;
  for (size_t i = 0; i < out_.size() && count + 2 <= parts.size(); ++i) {
    if (skip < kFrameHeaderBytes) parts[count++] = {headers_[i].data() + skip, kFrameHeaderBytes - skip};
    const size_t payload = out_[i].header.has_payload() ? out_[i].header.length : 0;
    const size_t in_payload = skip > kFrameHeaderBytes ? skip - kFrameHeaderBytes : 0;
    if (payload > in_payload) {
      parts[count++] = {const_cast<uint8_t*>(out_[i].payload) + in_payload, payload - in_payload};
    }
    skip = 0;
  }
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = count;
  const ssize_t sent = ::sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0) {
    if (errno == EAGAIN || errno == EINTR) {
      if (blocked_since_ == Clock::time_point::max()) blocked_since_ = Clock::now();
      return false;
    }
    // The peer may have said why before it closed: read that first, unless nobody listens any more.
    const std::string reason = std::string("broke its connection: ") + std::strerror(errno);
    while (!broken_ && !paused_ && !finishing_ && read_some() > 0) {
    }
    if (!broken_) broken(reason);
    return false;
  }
  blocked_since_ = Clock::time_point::max();
  auto left = static_cast<size_t>(sent);
  const size_t raw = std::min(left, raw_.size());
  raw_.erase(raw_.begin(), raw_.begin() + static_cast<std::ptrdiff_t>(raw));
  left -= raw;
  front_written_ += left;
  while (!out_.empty()) {
    const size_t payload = out_.front().header.has_payload() ? out_.front().header.length : 0;
    const size_t whole = kFrameHeaderBytes + payload;
    if (front_written_ < whole) break;
    front_written_ -= whole;
    out_bytes_ -= payload;
    const OutFrame frame = std::move(out_.front());
    out_.pop_front();
    headers_.pop_front();
    if (!finishing_) handler_.on_sent(*this, frame);
    if (broken_) return false;
  }
  return true;
}

void Connection::finish() {
  if (finishing_ || broken_) return;
  // A frame that was begun must be finished, or nothing behind it can be read; the rest are given up, except those that
  // own their bytes. Several were begun when the handler is just hearing of the first.
  std::deque<OutFrame> kept;
  std::deque<std::array<uint8_t, kFrameHeaderBytes>> kept_headers;
  size_t written = front_written_;
  for (size_t i = 0; i < out_.size(); ++i) {
    const size_t payload = out_[i].header.has_payload() ? out_[i].header.length : 0;
    const bool begun = written > 0;
    written -= std::min(written, kFrameHeaderBytes + payload);
    if (out_[i].owner != nullptr && !begun) continue;
    if (out_[i].owner != nullptr) {  // its bytes may go away, so copy them
      out_[i].owned.assign(out_[i].payload, out_[i].payload + payload);
      out_[i].payload = out_[i].owned.data();
    }
    kept.push_back(std::move(out_[i]));
    kept_headers.push_back(headers_[i]);
  }
  out_ = std::move(kept);
  for (OutFrame& frame : out_) {
    if (!frame.owned.empty()) frame.payload = frame.owned.data();
  }
  headers_ = std::move(kept_headers);
  finishing_ = true;
  flush();
  if (!broken_) watch();
}

// After the end: what still arrives is read and dropped, so that closing does not reset what we have sent.
void Connection::discard() {
  std::array<uint8_t, 65536> trash;
  for (int i = 0; i < 64; ++i) {
    const ssize_t got = ::read(fd_.get(), trash.data(), trash.size());
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) {
      broken("closed its connection");
      return;
    }
  }
}

void Connection::watch() {
  const uint32_t events = EPOLLRDHUP | (paused_ && !finishing_ ? 0u : static_cast<uint32_t>(EPOLLIN)) |
                          (wants_write_ ? static_cast<uint32_t>(EPOLLOUT) : 0u);
  if (events == watched_) return;
  watched_ = events;
  poller_.change(fd_.get(), events, this);
}

void Connection::broken(const std::string& reason) {
  if (broken_) return;
  broken_ = true;
  poller_.remove(fd_.get());
  fd_.reset();
  handler_.on_broken(*this, reason);
}

}  // namespace paceline
