// What the progress thread sleeps on.
#pragma once

#include <sys/epoll.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "common/fd.h"

namespace paceline {

class Watcher {
 public:
  virtual ~Watcher() = default;
  virtual void on_event(uint32_t events) = 0;
};

// Something that is read from memory: nothing tells of it but a look.
class MemoryWatcher {
 public:
  virtual ~MemoryWatcher() = default;
  virtual bool ready() const = 0;
  virtual void on_ready() = 0;
  // From now on whoever writes to it must wake this process, or need not any more.
  virtual void fall_asleep() = 0;
  virtual void wake_up() = 0;
};

class Poller {
 public:
  Poller();

  void add(int fd, uint32_t events, Watcher* watcher);
  void change(int fd, uint32_t events, Watcher* watcher);
  void remove(int fd);
  // It is looked at from the next turn on.
  void add_memory(MemoryWatcher* memory);
  void remove_memory(MemoryWatcher* memory) { std::erase(memories_, memory); }

  // Keeps a watcher alive until no event of the current round can name it any more.
  void bury(std::unique_ptr<Watcher> watcher) { graves_.push_back(std::move(watcher)); }

  // Before a wait that may sleep: false when there is something in memory, so that it must not. Call with the lock.
  bool fall_asleep();
  // Whether a turn that does not sleep can do with a look at memory, without asking the kernel. Call with the lock.
  bool may_glance() { return !memories_.empty() && ++glances_ % kGlances != 0; }
  // Sleeps until something happens or the time is over; returns the number of events. Call without the lock.
  int wait(int timeout_ms);
  // Hands the events, and what is in memory, to their watchers; returns whether there was anything. Call with the lock.
  bool dispatch(int count);

 private:
  static constexpr uint32_t kGlances = 8;

  Fd epoll_;
  const pid_t process_ = ::getpid();
  std::vector<epoll_event> events_;
  std::vector<MemoryWatcher*> memories_;
  bool asleep_ = false;
  uint32_t glances_ = 0;
  std::vector<std::unique_ptr<Watcher>> graves_;
};

}  // namespace paceline
