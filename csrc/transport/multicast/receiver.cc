#include "transport/multicast/receiver.h"

#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <stdexcept>

#include "common/system_error.h"
#include "transport/multicast/thread.h"

namespace paceline {
namespace {

using std::chrono::milliseconds;

// What the kernel gives in one piece, at most; and so many pieces are read at once. More would leave the cache before
// they are looked at.
constexpr size_t kMergedBytes = 64 << 10;
constexpr size_t kMergedPieces = 8;
constexpr size_t kSinglePackets = 64;

// Under a transfer's lock no more is copied at once.
constexpr size_t kSliceBytes = 128 << 10;

// While packets keep coming, quiet transfers are looked for so often.
constexpr milliseconds kLookWhileBusy{5};

// Sums of times do not overflow.
constexpr std::chrono::hours kLongestQuiet{24};

// After the kernel was out of memory.
constexpr milliseconds kRest{1};

}  // namespace

// What one system call reads.
class MulticastReceiver::Batch {
 public:
  // `piece_bytes` hold the longest datagram that is of use.
  Batch(size_t pieces, size_t piece_bytes)
      : piece_bytes_(piece_bytes),
        bytes_(std::make_unique_for_overwrite<uint8_t[]>(pieces * piece_bytes)),
        parts_(pieces),
        controls_(pieces),
        messages_(pieces) {
    for (size_t i = 0; i < pieces; ++i) {
      parts_[i] = {bytes_.get() + i * piece_bytes, piece_bytes};
      messages_[i].msg_hdr.msg_iov = &parts_[i];
      messages_[i].msg_hdr.msg_iovlen = 1;
      messages_[i].msg_hdr.msg_control = controls_[i].bytes.data();
    }
  }

  // As recvmmsg, without waiting.
  int read(int socket) {
    for (mmsghdr& message : messages_) message.msg_hdr.msg_controllen = sizeof(Control);
    return ::recvmmsg(socket, messages_.data(), static_cast<unsigned>(messages_.size()), MSG_DONTWAIT, nullptr);
  }

  // Calls `work` with each packet of a piece.
  template <typename Work>
  void for_each_packet(size_t piece, const Work& work) {
    const std::span<const uint8_t> datagram(bytes_.get() + piece * piece_bytes_, messages_[piece].msg_len);
    const size_t packet_bytes = merged_from(messages_[piece].msg_hdr).value_or(datagram.size());
    size_t at = 0;
    do {  // once for an empty one, too
      work(datagram.subspan(at, std::min(packet_bytes, datagram.size() - at)));
      at += packet_bytes;
    } while (at < datagram.size());
  }

 private:
  struct Control {
    alignas(cmsghdr) std::array<uint8_t, CMSG_SPACE(sizeof(int))> bytes;
  };

  // The size of the packets that this datagram was made of. UDP_GRO is the only control message that the socket asks
  // for, so there is space for this one: another would take it.
  static std::optional<size_t> merged_from(msghdr& message) {
    const cmsghdr* const control = CMSG_FIRSTHDR(&message);
    if (control == nullptr || control->cmsg_level != IPPROTO_UDP || control->cmsg_type != UDP_GRO) return std::nullopt;
    int bytes = 0;
    std::memcpy(&bytes, CMSG_DATA(control), sizeof(bytes));
    return bytes > 0 ? std::optional<size_t>(bytes) : std::nullopt;
  }

  size_t piece_bytes_;
  std::unique_ptr<uint8_t[]> bytes_;
  std::vector<iovec> parts_;
  std::vector<Control> controls_;
  std::vector<mmsghdr> messages_;
};

MulticastReceiver::Armed::Armed(uint32_t from, uint8_t* to, const Chunks& chunks, milliseconds quiet_limit)
    : source(from),
      placement(to, chunks),
      quiet_after(std::min<milliseconds>(quiet_limit, kLongestQuiet)),
      heard(Clock::now()) {}

MulticastReceiver::MulticastReceiver(const MulticastSettings& settings, uint32_t chunk_bytes, Fd socket, bool merged,
                                     MulticastEvents& events)
    : rank_(settings.rank),
      chunk_bytes_(chunk_bytes),
      group_mark_(group_mark(settings.secret, settings.group_id)),
      filter_(settings.receive_filter),
      merged_(merged),
      socket_(std::move(socket)),
      events_(events) {
  for (uint32_t rank = 0; rank < settings.num_ranks; ++rank) {
    authenticators_.emplace_back(packet_key(settings.secret, settings.group_id, rank));
  }
  thread_ = start_thread("paceline-mc-in", settings.receiving_core, [this] { run(); });
}

MulticastReceiver::~MulticastReceiver() {
  stopping_ = true;
  bell_.ring();
  thread_.join();
}

void MulticastReceiver::arm(uint64_t transfer, uint32_t source, uint8_t* to, uint64_t bytes, milliseconds quiet_after) {
  const Chunks chunks{bytes, chunk_bytes_};
  if (source >= authenticators_.size() || source == rank_) {
    throw std::invalid_argument("multicast: a transfer from no other rank of the group");
  }
  if (!chunks.can_be_numbered())
    throw std::invalid_argument("multicast: a transfer of more bytes than packets can name");
  const auto armed = std::make_shared<Armed>(source, to, chunks, quiet_after);
  bool early = false;
  {
    const std::lock_guard lock(table_mutex_);
    if (!table_.emplace(transfer, armed).second) throw std::invalid_argument("multicast: a transfer is armed twice");
    early = quiet_after > milliseconds(0) && armed->heard + armed->quiet_after < looks_at_;
  }
  if (early) bell_.ring();
  if (bytes == 0) events_.add({Multicast::Event::Kind::kComplete, transfer});
}

void MulticastReceiver::disarm(uint64_t transfer) noexcept {
  std::shared_ptr<Armed> armed;
  {
    const std::lock_guard lock(table_mutex_);
    const auto found = table_.find(transfer);
    if (found == table_.end()) return;
    armed = std::move(found->second);
    table_.erase(found);
  }
  const std::lock_guard lock(armed->mutex);
  armed->open = false;
}

std::shared_ptr<MulticastReceiver::Armed> MulticastReceiver::find(uint64_t transfer) const {
  const std::lock_guard lock(table_mutex_);
  const auto found = table_.find(transfer);
  return found == table_.end() ? nullptr : found->second;
}

bool MulticastReceiver::place(uint64_t transfer, uint64_t offset, std::span<const uint8_t> bytes) {
  const std::shared_ptr<Armed> armed = find(transfer);
  if (armed == nullptr) return false;
  const uint64_t total = armed->placement.chunks().total;
  if (offset > total || bytes.size() > total - offset) return false;
  for (;;) {
    const std::span<const uint8_t> slice = bytes.first(std::min(bytes.size(), kSliceBytes));
    const std::lock_guard lock(armed->mutex);
    if (!armed->open) return false;
    armed->placement.place(offset, slice);
    armed->heard = Clock::now();
    offset += slice.size();
    bytes = bytes.subspan(slice.size());
    if (bytes.empty()) return armed->placement.complete();
  }
}

std::vector<Range> MulticastReceiver::missing(uint64_t transfer, size_t most) const {
  const std::shared_ptr<Armed> armed = find(transfer);
  if (armed == nullptr) return {};
  const std::lock_guard lock(armed->mutex);
  return armed->placement.missing(most);
}

void MulticastReceiver::count(Multicast::Counters* counters) const {
  {
    const std::lock_guard lock(count_mutex_);
    counters->packets_received = published_.packets_received;
    counters->bytes_received = published_.bytes_received;
    counters->malformed = published_.malformed;
    counters->forged = published_.forged;
    counters->stale = published_.stale;
    counters->mismatched = published_.mismatched;
    counters->duplicate = published_.duplicate;
    counters->batches_received = published_.batches_received;
  }
  std::array<uint32_t, SK_MEMINFO_VARS> memory{};
  socklen_t length = sizeof(memory);
  if (::getsockopt(socket_.get(), SOL_SOCKET, SO_MEMINFO, memory.data(), &length) == 0) {
    counters->overflowed = memory[SK_MEMINFO_DROPS];
  }
}

void MulticastReceiver::close_files() {
  socket_.reset();
  bell_.close();
}

void MulticastReceiver::run() {
  try {
    Batch batch =
        merged_ ? Batch(kMergedPieces, kMergedBytes) : Batch(kSinglePackets, kPacketOverheadBytes + chunk_bytes_ + 1);
    while (!stopping_) {
      drain(batch);
      wait();
    }
  } catch (const std::exception& thrown) {
    events_.fail(std::string("the thread that receives multicast packets has ended: ") + thrown.what());
  }
}

void MulticastReceiver::drain(Batch& batch) {
  while (!stopping_) {
    const int pieces = batch.read(socket_.get());
    if (pieces < 0) {
      if (errno == EAGAIN) return;
      if (errno == EINTR) continue;
      if (errno != ENOMEM && errno != ENOBUFS) fail("multicast: recvmmsg");
      std::this_thread::sleep_for(kRest);
      continue;
    }
    const Clock::time_point now = Clock::now();
    for (size_t i = 0; i < static_cast<size_t>(pieces); ++i) {
      batch.for_each_packet(i, [&](std::span<const uint8_t> packet) { receive(packet, now); });
    }
    recent_.reset();
    ++counted_.batches_received;
    publish();
    if (now >= next_look_) {
      tell_quiet(now, false);
      next_look_ = now + kLookWhileBusy;
    }
  }
}

void MulticastReceiver::publish() {
  const std::lock_guard lock(count_mutex_);
  published_ = counted_;
}

void MulticastReceiver::wait() {
  const Clock::time_point now = Clock::now();
  const Clock::time_point until = tell_quiet(now, true);
  const auto left = std::chrono::ceil<milliseconds>(until - now).count();
  std::array<pollfd, 2> files{{{socket_.get(), POLLIN, 0}, {bell_.fd(), POLLIN, 0}}};
  const int ready = ::poll(files.data(), files.size(), until == Clock::time_point::max() ? -1 : static_cast<int>(left));
  if (ready < 0 && errno != EINTR && errno != ENOMEM) fail("multicast: poll");
  if (ready > 0 && files[1].revents != 0) bell_.quiet();
}

MulticastReceiver::Clock::time_point MulticastReceiver::tell_quiet(Clock::time_point now, bool drained) {
  const std::lock_guard lock(table_mutex_);
  looks_at_ = Clock::time_point::max();
  for (const auto& [transfer, armed] : table_) {
    const std::lock_guard armed_lock(armed->mutex);
    if (armed->quiet_after <= milliseconds(0) || armed->placement.complete()) continue;
    if (armed->heard + armed->quiet_after * (drained ? 1 : 2) <= now) {
      events_.add_once({Multicast::Event::Kind::kQuiet, transfer});
      armed->heard = now;
    }
    looks_at_ = std::min(looks_at_, armed->heard + armed->quiet_after);
  }
  return looks_at_;
}

void MulticastReceiver::receive(std::span<const uint8_t> packet, Clock::time_point now) {
  PacketHeader header;
  const bool ours = decode(packet, &header) && header.group_mark == group_mark_;
  if (ours && header.source == rank_) return;  // looped back by this host
  if (filter_ && !filter_(packet)) return;
  ++counted_.packets_received;
  if (!ours || header.source >= authenticators_.size()) {
    ++counted_.malformed;
  } else if (!authenticators_[header.source].genuine(packet)) {
    ++counted_.forged;
  } else {
    place(header, packet.data() + kPacketHeaderBytes, now);
  }
}

void MulticastReceiver::place(const PacketHeader& header, const uint8_t* payload, Clock::time_point now) {
  if (recent_ == nullptr || recent_transfer_ != header.transfer) {
    recent_ = find(header.transfer);
    recent_transfer_ = header.transfer;
  }
  if (recent_ == nullptr) {
    ++counted_.stale;
    return;
  }
  const std::lock_guard lock(recent_->mutex);
  if (!recent_->open) {
    ++counted_.stale;
  } else if (recent_->source != header.source || recent_->placement.chunks() != header.chunks) {
    ++counted_.mismatched;
  } else if (!recent_->placement.place_chunk(header.chunk, payload)) {
    ++counted_.duplicate;
  } else {
    counted_.bytes_received += header.payload_bytes();
    recent_->heard = now;
    if (!recent_->placement.complete()) return;
    publish();  // who has heard of the event finds its packets counted
    events_.add({Multicast::Event::Kind::kComplete, header.transfer});
  }
}

}  // namespace paceline
