#include "transport/multicast/sender.h"

#include <netinet/in.h>
#include <netinet/udp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <stdexcept>
#include <utility>

#include "common/log.h"
#include "common/system_error.h"
#include "transport/multicast/thread.h"

namespace paceline {
namespace {

using std::chrono::milliseconds;

constexpr size_t kMostPackets = 64;            // that any kernel sends merged
constexpr size_t kMostBytes = 65535 - 60 - 8;  // of all of them, in one datagram of IPv4

constexpr uint64_t kBurstsPerSecond = 1000;

// On a busy host a thread is often called later than it asked for. So much of the time that it lost is made up for.
constexpr milliseconds kCatchUp{4};

// A full queue of the kernel is looked at again after this time at the latest, in which the thread may have been
// stopped.
constexpr milliseconds kLongestWait{10};
constexpr milliseconds kRest{1};  // after the kernel was out of memory

// The kernel cannot merge: for this interface, with this protocol on the way.
bool cannot_merge(int error) {
  return error == EIO || error == EINVAL || error == EOPNOTSUPP || error == EMSGSIZE || error == ENOPROTOOPT;
}

// Nothing leaves the host at the moment, which is as if packets were lost behind it: others will notice, and repair.
bool refuses(int error) {
  return error == ENETUNREACH || error == ENETDOWN || error == EHOSTUNREACH || error == EHOSTDOWN || error == EPERM ||
         error == EACCES || error == EADDRNOTAVAIL || error == ENODEV || error == ENXIO || error == ECONNREFUSED;
}

}  // namespace

void Pacer::set_rate(uint64_t bytes_per_s, Clock::time_point now) {
  bytes_per_s_ = bytes_per_s;
  next_ = std::min(next_, now);  // no long wait from a low rate before
}

size_t Pacer::burst(size_t packet_bytes, size_t most) const {
  if (bytes_per_s_ == 0) return most;
  return std::clamp<size_t>(bytes_per_s_ / kBurstsPerSecond / packet_bytes, 1, most);
}

void Pacer::spend(uint64_t bytes, Clock::time_point now) {
  next_ = std::max(next_, now - kCatchUp);
  if (bytes_per_s_ == 0) return;
  const std::chrono::duration<double> takes(static_cast<double>(bytes) / static_cast<double>(bytes_per_s_));
  next_ += std::chrono::duration_cast<Clock::duration>(takes);
}

// Some packets of one job: headers and tags are here, payload stays where it is.
class MulticastSender::Burst {
 public:
  void clear() { size_ = 0; }
  size_t size() const { return size_; }

  void add(const PacketHeader& header, const uint8_t* payload, Authenticator& authenticator) {
    std::array<uint8_t, kPacketHeaderBytes>& bytes = headers_[size_];
    encode(header, bytes);
    const size_t length = header.payload_bytes();
    tags_[size_] = authenticator.tag(bytes, {payload, length});
    iovec* const parts = &parts_[size_ * kParts];
    parts[0] = {bytes.data(), bytes.size()};
    parts[1] = {const_cast<uint8_t*>(payload), length};
    parts[2] = {tags_[size_].data(), tags_[size_].size()};
    messages_[size_].msg_hdr.msg_iov = parts;
    messages_[size_].msg_hdr.msg_iovlen = kParts;
    ++size_;
  }

  // Bytes of the first `packets` of them.
  uint64_t bytes(size_t packets) const {
    uint64_t sum = 0;
    for (size_t i = 0; i < packets; ++i) sum += kPacketOverheadBytes + parts_[i * kParts + 1].iov_len;
    return sum;
  }

  // Both say how many were taken; -1: none, and errno says why.
  int send_merged(int socket) {
    msghdr all{};
    all.msg_iov = parts_.data();
    all.msg_iovlen = size_ * kParts;
    return ::sendmsg(socket, &all, MSG_DONTWAIT) < 0 ? -1 : static_cast<int>(size_);
  }
  int send_singly(int socket) {
    return ::sendmmsg(socket, messages_.data(), static_cast<unsigned>(size_), MSG_DONTWAIT);
  }

 private:
  static constexpr size_t kParts = 3;

  size_t size_ = 0;
  std::array<std::array<uint8_t, kPacketHeaderBytes>, kMostPackets> headers_{};
  std::array<Tag, kMostPackets> tags_{};
  std::array<iovec, kMostPackets * kParts> parts_{};
  std::array<mmsghdr, kMostPackets> messages_{};
};

MulticastSender::MulticastSender(const MulticastSettings& settings, uint32_t chunk_bytes, Fd socket,
                                 uint32_t link_bytes, MulticastEvents& events)
    : rank_(settings.rank),
      chunk_bytes_(chunk_bytes),
      group_mark_(group_mark(settings.secret, settings.group_id)),
      link_bytes_(link_bytes),
      socket_(std::move(socket)),
      events_(events),
      authenticator_(packet_key(settings.secret, settings.group_id, settings.rank)) {
  pacer_.set_rate(settings.rate_bytes_per_s, Clock::now());
  const int packet_bytes = static_cast<int>(kPacketOverheadBytes + chunk_bytes);
  merges_ = settings.merge_packets &&
            ::setsockopt(socket_.get(), IPPROTO_UDP, UDP_SEGMENT, &packet_bytes, sizeof(packet_bytes)) == 0;
  thread_ = start_thread("paceline-mc-out", -1, [this] { run(); });
}

MulticastSender::~MulticastSender() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void MulticastSender::send(uint64_t transfer, const uint8_t* from, uint64_t bytes) {
  const Chunks chunks{bytes, chunk_bytes_};
  add({.transfer = transfer, .from = from, .chunks = chunks, .runs = {{0, chunks.count()}}, .again = false});
}

void MulticastSender::send_again(uint64_t transfer, const uint8_t* from, uint64_t bytes,
                                 std::span<const Range> ranges) {
  const Chunks chunks{bytes, chunk_bytes_};
  std::vector<Run> touched;
  for (const Range& range : ranges) {
    if (range.offset >= bytes || range.bytes == 0) continue;
    const uint64_t last = range.offset + std::min(range.bytes, bytes - range.offset) - 1;
    touched.push_back({range.offset / chunk_bytes_, last / chunk_bytes_ + 1});
  }
  std::sort(touched.begin(), touched.end(), [](const Run& a, const Run& b) { return a.chunk < b.chunk; });
  Job job{.transfer = transfer, .from = from, .chunks = chunks, .runs = {}, .again = true};
  for (const Run& run : touched) {  // each chunk once
    if (!job.runs.empty() && run.chunk <= job.runs.back().end) {
      job.runs.back().end = std::max(job.runs.back().end, run.end);
    } else {
      job.runs.push_back(run);
    }
  }
  add(std::move(job));
}

void MulticastSender::add(Job job) {
  if (!job.chunks.can_be_numbered()) {
    throw std::invalid_argument("multicast: a transfer of more bytes than packets can name");
  }
  if (job.runs.empty() || job.runs.front().chunk == job.runs.front().end) {  // no bytes
    events_.add({Multicast::Event::Kind::kSent, job.transfer});
    return;
  }
  const std::lock_guard lock(mutex_);
  if (failed_) return;
  if (jobs_.empty()) pacer_.begin(Clock::now());
  auto before = jobs_.end();
  if (job.again) before = std::find_if(jobs_.begin(), jobs_.end(), [](const Job& other) { return !other.again; });
  jobs_.insert(before, std::move(job));
  changed_.notify_one();
}

void MulticastSender::cancel(uint64_t transfer) noexcept {
  std::unique_lock lock(mutex_);
  for (Job& job : jobs_) job.cancelled = job.cancelled || job.transfer == transfer;
  jobs_.remove_if([this](const Job& job) { return job.cancelled && &job != working_on_; });
  idle_.wait(lock, [this] { return working_on_ == nullptr || !working_on_->cancelled; });
}

void MulticastSender::set_rate(uint64_t bytes_per_s) {
  const std::lock_guard lock(mutex_);
  pacer_.set_rate(bytes_per_s, Clock::now());
  changed_.notify_one();
}

void MulticastSender::count(Multicast::Counters* counters) const {
  const std::lock_guard lock(mutex_);
  counters->packets_sent = counted_.packets_sent;
  counters->bytes_sent = counted_.bytes_sent;
  counters->packets_refused = counted_.packets_refused;
  counters->batches_sent = counted_.batches_sent;
}

void MulticastSender::run() {
  std::unique_lock lock(mutex_, std::defer_lock);
  try {
    const auto burst = std::make_unique<Burst>();
    lock.lock();
    while (!stopping_) {
      if (jobs_.empty()) {
        changed_.wait(lock);
      } else {
        work(lock, *burst);
      }
    }
  } catch (const std::exception& thrown) {
    if (!lock.owns_lock()) lock.lock();
    failed_ = true;
    working_on_ = nullptr;
    jobs_.clear();
    idle_.notify_all();
    events_.fail(std::string("the thread that sends multicast packets has ended: ") + thrown.what());
  }
}

void MulticastSender::work(std::unique_lock<std::mutex>& lock, Burst& burst) {
  const Clock::time_point now = Clock::now();
  if (now < pacer_.next()) {
    changed_.wait_until(lock, pacer_.next());
    return;
  }
  const size_t packet_bytes = kPacketOverheadBytes + chunk_bytes_;
  const size_t most = pacer_.burst(packet_bytes + link_bytes_, std::min(kMostPackets, kMostBytes / packet_bytes));
  const auto job = jobs_.begin();
  working_on_ = &*job;
  lock.unlock();

  burst.clear();
  PacketHeader header{.group_mark = group_mark_, .source = rank_, .transfer = job->transfer, .chunks = job->chunks};
  for (const Run& run : job->runs) {
    if (burst.size() == most) break;
    for (uint64_t chunk = run.chunk; chunk < run.end && burst.size() < most; ++chunk) {
      header.chunk = static_cast<uint32_t>(chunk);
      nonces_.next(&header);
      burst.add(header, job->from + job->chunks.offset(chunk), authenticator_);
    }
  }
  size_t packets = 0;
  const Outcome outcome = transmit(burst, &packets);

  lock.lock();
  working_on_ = nullptr;
  idle_.notify_all();
  if (job->cancelled) {
    jobs_.erase(job);
  } else if (outcome == Outcome::kTaken || outcome == Outcome::kRefused) {
    advance(job, packets);
  }
  switch (outcome) {
    case Outcome::kTaken: {
      const uint64_t bytes = burst.bytes(packets) + packets * link_bytes_;
      pacer_.spend(bytes, now);
      counted_.packets_sent += packets;
      counted_.bytes_sent += bytes;
      ++counted_.batches_sent;
      break;
    }
    case Outcome::kRefused:
      pacer_.spend(burst.bytes(packets), now);
      counted_.packets_refused += packets;
      break;
    case Outcome::kNoRoom: {
      lock.unlock();
      pollfd room{socket_.get(), POLLOUT, 0};
      ::poll(&room, 1, static_cast<int>(kLongestWait.count()));
      lock.lock();
      break;
    }
    case Outcome::kNoMemory:
      changed_.wait_for(lock, kRest);
      break;
    case Outcome::kAgain:
      break;
  }
}

void MulticastSender::advance(std::list<Job>::iterator job, size_t packets) {
  while (packets > 0) {
    Run& run = job->runs.front();
    const uint64_t done = std::min<uint64_t>(packets, run.end - run.chunk);
    run.chunk += done;
    packets -= done;
    if (run.chunk == run.end) job->runs.pop_front();
  }
  if (!job->runs.empty()) return;
  events_.add({Multicast::Event::Kind::kSent, job->transfer});
  jobs_.erase(job);
}

MulticastSender::Outcome MulticastSender::transmit(Burst& burst, size_t* packets) {
  const bool merged = merges_;
  const int sent = merged ? burst.send_merged(socket_.get()) : burst.send_singly(socket_.get());
  const int error = errno;
  if (sent >= 0) {
    *packets = static_cast<size_t>(sent);
    return Outcome::kTaken;
  }
  if (merged && cannot_merge(error)) {
    const int none = 0;
    if (::setsockopt(socket_.get(), IPPROTO_UDP, UDP_SEGMENT, &none, sizeof(none)) != 0) fail("multicast: UDP_SEGMENT");
    merges_ = false;
    log(LogLevel::kInfo, "multicast: the kernel cannot send packets merged here, so they are sent one by one");
    return Outcome::kAgain;
  }
  if (error == EAGAIN) return Outcome::kNoRoom;
  if (error == ENOBUFS || error == ENOMEM) return Outcome::kNoMemory;
  if (error == EINTR) return Outcome::kAgain;
  if (!refuses(error)) fail("multicast: sending", error);
  *packets = burst.size();
  return Outcome::kRefused;
}

}  // namespace paceline
