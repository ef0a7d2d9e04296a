// What the progress thread sleeps on.
#pragma once

#include <sys/epoll.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <set>
#include <vector>

#include "common/fd.h"

namespace paceline {

class Watcher {
 public:
  virtual ~Watcher() = default;
  virtual void on_event(uint32_t events) = 0;
  // An exception has left `on_event` or `on_ready`, and has come as far as it may.
  virtual void on_exception(const char* what) noexcept = 0;

  // Of one that also waits for memory to change, of which nothing tells but a look.
  virtual bool ready() const { return false; }
  virtual void on_ready() {}
  // From now on who changes it must wake this process, or need not any more.
  virtual void fall_asleep() {}
  virtual void wake_up() {}
  // Wakes the process at the other end, if that still sleeps.
  virtual void wake_other() {}

 private:
  friend class Poller;
  std::unique_ptr<Watcher> next_grave_;
  bool buried_ = false;
};

class Poller {
 public:
  using Clock = std::chrono::steady_clock;

  // `callers` counts those who wait for the lock under which watchers are called.
  explicit Poller(const std::atomic<int>& callers);

  void add(int fd, uint32_t events, Watcher* watcher);
  void change(int fd, uint32_t events, Watcher* watcher);
  void remove(int fd);
  // Of a forked child: closes its copies of all that was added, which is all that its parent has open to others.
  void close_all();
  // Looks at its memory as well.
  void add_memory(Watcher* watcher);
  void remove_memory(Watcher* watcher) {
    std::erase(memories_, watcher);
    std::erase(silent_, watcher);
  }

  // Whether who is at the other end is not woken now, but by the next `ring_all`.
  bool rings_later(Watcher* watcher) {
    if (puts_off_rings_) silent_.push_back(watcher);
    return puts_off_rings_;
  }
  void put_off_rings(bool put_off) { puts_off_rings_ = put_off; }
  void ring_all();

  // Keeps a watcher alive until no event of the current round can name it any more.
  void bury(std::unique_ptr<Watcher> watcher) noexcept;

  // Whether somebody waits for the lock: a watcher with more to do leaves it for the next turn.
  bool others_wait() const { return callers_.load(std::memory_order_relaxed) > 0; }

  // Before a wait that may sleep: false when there is something in memory, so that it must not. Call with the lock.
  bool fall_asleep();
  // Whether a turn that waits for nothing can do with a look at memory: the kernel was asked just before, or has had
  // nothing to say for a while and was asked not long ago.
  bool may_glance(Clock::time_point now) const {
    const bool silent = now > heard_at_ + kSilence;
    return !memories_.empty() && now < asked_at_ + (silent ? kGlancing : kGlancingAtNews);
  }
  bool has_memory() const { return !memories_.empty(); }
  // One thread at a time: `prepare_wait` with the lock, `wait` without it, which sleeps until something happens or the
  // time is over, and `dispatch` with the lock, which hands the events, and what is in memory, to their watchers, and
  // returns whether there was anything. Where others wait for the lock, or it is `until`, the rest is left for the next
  // turn.
  void prepare_wait() { waiting_ = true; }
  void wait(int timeout_ms);
  bool dispatch(Clock::time_point until);
  // Whether a thread is between the first and the last of them.
  bool is_waiting() const { return waiting_; }
  // The same for what is in memory alone, also while another thread waits. Call with the lock.
  bool glance();

 private:
  static constexpr auto kSilence = std::chrono::milliseconds(1);
  static constexpr auto kGlancing = std::chrono::microseconds(100), kGlancingAtNews = std::chrono::microseconds(20);

  template <typename Work>
  static void guarded(Watcher& watcher, const Work& work) noexcept;

  void wake_up();

  const std::atomic<int>& callers_;
  Fd epoll_;
  std::set<int> fds_;
  std::vector<epoll_event> events_;  // of the thread that waits
  size_t num_events_ = 0;
  std::vector<Watcher*> memories_;
  std::vector<Watcher*> silent_;  // have somebody to wake
  bool puts_off_rings_ = false;
  bool asleep_ = false;
  bool waiting_ = false;
  Clock::time_point asked_at_, heard_at_;
  size_t rounds_ = 0;
  std::unique_ptr<Watcher> graves_;  // a list
};

}  // namespace paceline
