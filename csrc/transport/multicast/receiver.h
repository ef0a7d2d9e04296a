// The receiving thread: reads packets, checks them, and puts their bytes where they belong.
//
//   lock          guards                                      taken by
//   table_mutex_  which transfers are armed                   all, for the time of a look
//   Armed::mutex  one transfer: its bitmap, its memory        the receiving thread for a packet, callers for a slice
//
// The table's lock may be held while a transfer's is taken, not the other way round. A transfer that was disarmed is
// closed under its lock: after that a thread that has just found it in the table leaves its memory alone.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <unordered_map>
#include <vector>

#include "transport/multicast/authentication.h"
#include "transport/multicast/events.h"
#include "transport/multicast/multicast.h"
#include "transport/multicast/packet.h"
#include "transport/multicast/placement.h"

namespace paceline {

class MulticastReceiver {
 public:
  using Clock = std::chrono::steady_clock;

  // `merged`: as the socket was opened.
  MulticastReceiver(const MulticastSettings& settings, uint32_t chunk_bytes, Fd socket, bool merged,
                    MulticastEvents& events);
  ~MulticastReceiver();

  void arm(uint64_t transfer, uint32_t source, uint8_t* to, uint64_t bytes, std::chrono::milliseconds quiet_after);
  void disarm(uint64_t transfer) noexcept;
  bool place(uint64_t transfer, uint64_t offset, std::span<const uint8_t> bytes);
  std::vector<Range> missing(uint64_t transfer, size_t most) const;
  // Adds this side's to them.
  void count(Multicast::Counters* counters) const;
  // In a forked child.
  void close_files();

 private:
  struct Armed {
    Armed(uint32_t source, uint8_t* to, const Chunks& chunks, std::chrono::milliseconds quiet_after);

    std::mutex mutex;
    const uint32_t source;
    Placement placement;
    bool open = true;  // not disarmed
    const std::chrono::milliseconds quiet_after;
    Clock::time_point heard;  // when something new came last, or kQuiet was told
  };
  class Batch;

  std::shared_ptr<Armed> find(uint64_t transfer) const;
  void run();
  // Reads packets until the socket is empty.
  void drain(Batch& batch);
  void publish();
  // Sleeps until there is something to do.
  void wait();
  void receive(std::span<const uint8_t> packet, Clock::time_point now);
  // Of a packet that is genuine.
  void place(const PacketHeader& header, const uint8_t* payload, Clock::time_point now);
  // Tells of transfers that have been quiet for long enough, and says when to look again. Where the socket was not
  // `drained`, their packets may still be in it, so they are given as long again.
  Clock::time_point tell_quiet(Clock::time_point now, bool drained);

  const uint32_t rank_;
  const uint32_t chunk_bytes_;
  const uint32_t group_mark_;
  const std::function<bool(std::span<const uint8_t>)> filter_;
  const bool merged_;
  Fd socket_;
  EventFd bell_;
  MulticastEvents& events_;

  mutable std::mutex table_mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<Armed>> table_;
  Clock::time_point looks_at_;  // the thread looks for quiet transfers by then

  // Of the thread.
  std::vector<Authenticator> authenticators_;  // by rank
  std::shared_ptr<Armed> recent_;              // of the packet before, most likely of the next one, too
  uint64_t recent_transfer_ = 0;
  Clock::time_point next_look_;
  Multicast::Counters counted_;

  mutable std::mutex count_mutex_;
  Multicast::Counters published_;

  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace paceline
