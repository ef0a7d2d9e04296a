// What the progress thread sleeps on.
#pragma once

#include <sys/epoll.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/fd.h"

namespace paceline {

class Watcher {
 public:
  virtual ~Watcher() = default;
  virtual void on_event(uint32_t events) = 0;

  // Of one that also waits for memory to change, of which nothing tells but a look.
  virtual bool ready() const { return false; }
  virtual void on_ready() {}
  // From now on who changes it must wake this process, or need not any more.
  virtual void fall_asleep() {}
  virtual void wake_up() {}
};

class Poller {
 public:
  using Clock = std::chrono::steady_clock;

  Poller();

  void add(int fd, uint32_t events, Watcher* watcher);
  void change(int fd, uint32_t events, Watcher* watcher);
  void remove(int fd);
  // Looks at its memory as well.
  void add_memory(Watcher* watcher);
  void remove_memory(Watcher* watcher) { std::erase(memories_, watcher); }

  // Keeps a watcher alive until no event of the current round can name it any more.
  void bury(std::unique_ptr<Watcher> watcher);

  // Before a wait that may sleep: false when there is something in memory, so that it must not. Call with the lock.
  bool fall_asleep();
  // Whether a turn that waits for nothing can do with a look at memory: the kernel was asked just before, or has had
  // nothing to say for a while and was asked not long ago.
  bool may_glance(Clock::time_point now) const {
    const bool silent = now > heard_at_ + kSilence;
    return !memories_.empty() && now < asked_at_ + (silent ? kGlancing : kGlancingAtNews);
  }
  // Sleeps until something happens or the time is over; returns the number of events. Call without the lock.
  int wait(int timeout_ms);
  // Hands the events, and what is in memory, to their watchers; returns whether there was anything. Call with the lock.
  bool dispatch(int count);

 private:
  static constexpr auto kSilence = std::chrono::milliseconds(1);
  static constexpr auto kGlancing = std::chrono::microseconds(100), kGlancingAtNews = std::chrono::microseconds(20);

  Fd epoll_;
  const pid_t process_ = ::getpid();
  std::vector<epoll_event> events_;
  std::vector<Watcher*> memories_;
  bool asleep_ = false;
  Clock::time_point asked_at_, heard_at_;
  std::vector<std::unique_ptr<Watcher>> graves_;
};

}  // namespace paceline
