// The sending thread: cuts transfers into packets, makes their tags, and hands them to the kernel at a steady rate.
//
// A job is removed by the thread alone while it works on it, so cancel() marks such a job and waits for the end of the
// burst, which is at most 64 packets. Other jobs are removed at once.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "transport/multicast/authentication.h"
#include "transport/multicast/events.h"
#include "transport/multicast/multicast.h"
#include "transport/multicast/packet.h"

namespace paceline {

// Allows so many bytes a second: says when the next ones may go.
class Pacer {
 public:
  using Clock = std::chrono::steady_clock;

  // 0: no limit.
  void set_rate(uint64_t bytes_per_s, Clock::time_point now);
  // How many packets of this size may go at once, at most `most`: what goes in a millisecond, so that queues on the way
  // stay short.
  size_t burst(size_t packet_bytes, size_t most) const;
  Clock::time_point next() const { return next_; }
  // There was nothing to send: what was not used is lost.
  void begin(Clock::time_point now) { next_ = std::max(next_, now); }
  // These bytes go now. A sleep that took too long is made up for, up to a limit.
  void spend(uint64_t bytes, Clock::time_point now);

 private:
  uint64_t bytes_per_s_ = 0;
  Clock::time_point next_;
};

class MulticastSender {
 public:
  using Clock = std::chrono::steady_clock;

  // `link_bytes`: what a packet has on the wire besides itself.
  MulticastSender(const MulticastSettings& settings, uint32_t chunk_bytes, Fd socket, uint32_t link_bytes,
                  MulticastEvents& events);
  ~MulticastSender();

  void send(uint64_t transfer, const uint8_t* from, uint64_t bytes);
  void send_again(uint64_t transfer, const uint8_t* from, uint64_t bytes, std::span<const Range> ranges);
  void cancel(uint64_t transfer) noexcept;
  void set_rate(uint64_t bytes_per_s);
  // Adds this side's to them.
  void count(Multicast::Counters* counters) const;
  bool merges() const { return merges_; }
  // In a forked child.
  void close_files() { socket_.reset(); }

 private:
  struct Run {
    uint64_t chunk, end;
  };
  struct Job {
    uint64_t transfer;
    const uint8_t* from;
    Chunks chunks;
    std::deque<Run> runs;  // that are left
    bool again;
    bool cancelled = false;
  };
  class Burst;
  enum class Outcome : uint8_t { kTaken, kRefused, kNoRoom, kNoMemory, kAgain };

  void add(Job job);
  void run();
  // One burst of the first job, or a sleep until it is due.
  void work(std::unique_lock<std::mutex>& lock, Burst& burst);
  // Without the lock: hands a burst to the kernel. Says how many of its packets were taken or refused.
  Outcome transmit(Burst& burst, size_t* packets);
  // So many of the next packets of a job are done; it ends with the last.
  void advance(std::list<Job>::iterator job, size_t packets);

  const uint32_t rank_;
  const uint32_t chunk_bytes_;
  const uint32_t group_mark_;
  const uint32_t link_bytes_;
  Fd socket_;
  MulticastEvents& events_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;  // there is a job, or the rate or stopping_ has changed
  std::condition_variable idle_;     // working_on_ has changed
  std::list<Job> jobs_;              // in their order
  const Job* working_on_ = nullptr;
  Pacer pacer_;
  bool stopping_ = false;
  bool failed_ = false;
  Multicast::Counters counted_;

  // Of the thread, but for those who ask.
  std::atomic<bool> merges_;

  // Of the thread.
  Authenticator authenticator_;
  Nonces nonces_;

  std::thread thread_;
};

}  // namespace paceline
