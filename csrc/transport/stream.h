// Bytes both ways between two processes of one host, through memory that each side shares with the other (rings.h).
//
// While the receiver is awake, neither side calls the kernel. One that is going to sleep says so, and looks once more;
// the sender sees that after it has written, and wakes it through the socket.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

namespace paceline {

class Stream {
 public:
  static constexpr uint64_t kBytes = 64 << 10;

  // What one side shares: only it writes here, and the other reads.
  struct Side {
    alignas(64) std::atomic<uint64_t> sent;      // bytes, ever
    alignas(64) std::atomic<uint64_t> received;  // of the other's bytes, ever
    alignas(64) std::atomic<uint64_t> sleeps;    // counts going to sleep and waking up: odd while asleep
    alignas(64) uint8_t bytes[kBytes];
  };

  Stream(Side& ours, const Side& theirs) : ours_(ours), theirs_(theirs) {}

  // As many of these bytes as there is room for.
  size_t write(std::span<const iovec> parts);
  // Whether the other side has received something since the last write.
  bool made_room() const { return theirs_.received.load() != known_received_; }
  // Whether the other side must be woken to see what was written; true once for each of its sleeps.
  bool finds_sleeper();
  // Whether the one found last is in the same sleep still.
  bool sleeps_on() const { return theirs_.sleeps.load() == woken_; }

  // As many bytes as are here and fit.
  size_t read(std::span<const iovec> parts);
  bool readable() const { return std::min(theirs_.sent.load(), end_) != received_; }
  // The other side is at its end: what it writes from now on is not read.
  void end() { end_ = theirs_.sent.load(); }
  // Who falls asleep must ask `readable` afterwards.
  void fall_asleep() { turn(1); }
  void wake_up() { turn(0); }

  // The other side claims to have sent or received what it cannot have.
  bool lied_to() const { return lied_to_; }

 private:
  void turn(uint64_t parity) {
    if (sleeps_ % 2 != parity) ours_.sleeps.store(++sleeps_);
  }

  Side& ours_;
  const Side& theirs_;
  uint64_t sent_ = 0, received_ = 0, sleeps_ = 0;
  uint64_t known_received_ = 0, woken_ = 0;
  uint64_t end_ = UINT64_MAX;
  bool lied_to_ = false;
};

}  // namespace paceline
