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

class Poller {
 public:
  Poller();

  void add(int fd, uint32_t events, Watcher* watcher);
  void change(int fd, uint32_t events, Watcher* watcher);
  void remove(int fd);

  // Keeps a watcher alive until no event of the current round can name it any more.
  void bury(std::unique_ptr<Watcher> watcher) { graves_.push_back(std::move(watcher)); }

  // Sleeps until something happens or the time is over; returns the number of events. Call without the lock.
  int wait(int timeout_ms);
  // Hands the events to their watchers. Call with the lock.
  void dispatch(int count);

 private:
  Fd epoll_;
  const pid_t process_ = ::getpid();
  std::vector<epoll_event> events_;
  std::vector<std::unique_ptr<Watcher>> graves_;
};

}  // namespace paceline
