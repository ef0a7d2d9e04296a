// Whether the host at the other end of a stream is still there.
//
// A stream with nothing to send is watched by the kernel (keep-alive, tcp.cc), and breaks with ETIMEDOUT. One with
// bytes on their way is looked at here: the kernel would repeat them for a quarter of an hour.
#pragma once

#include <algorithm>
#include <chrono>
#include <string>

#include "transport/transport.h"

namespace paceline {

class Liveness {
 public:
  using Clock = std::chrono::steady_clock;

  static constexpr auto kEvery = std::chrono::seconds(1);

  // Whether the host has not answered for too long. Call it about every second; with a timeout of 0 it is never true.
  bool lost(const Transport& transport, int fd, std::chrono::seconds timeout, Clock::time_point now) {
    if (timeout.count() <= 0 || now < look_at_) return false;
    // Where this process itself stood still meanwhile, answers may be waiting to be seen.
    if (now > look_at_ + kEvery) owes_since_ = Clock::time_point::max();
    look_at_ = now + kEvery;
    const std::chrono::milliseconds silence = transport.owes_answer_for(fd);
    // The last answer may be old because nothing was asked until now.
    owes_since_ = silence.count() > 0 ? std::min(owes_since_, now) : Clock::time_point::max();
    return silence >= timeout && owes_since_ <= now - timeout;
  }

 private:
  Clock::time_point look_at_, owes_since_ = Clock::time_point::max();
};

inline std::string lost_host(std::chrono::seconds timeout) {
  return "cannot be reached: its host has not answered for " + std::to_string(timeout.count()) +
         " s: the host or the network between is down";
}

}  // namespace paceline
