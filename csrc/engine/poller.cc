#include "engine/poller.h"

#include <cerrno>
#include <system_error>

namespace paceline {

Poller::Poller() : epoll_(::epoll_create1(EPOLL_CLOEXEC)), events_(256) {
  if (!epoll_) throw std::system_error(errno, std::generic_category(), "epoll_create1");
}

void Poller::add(int fd, uint32_t events, Watcher* watcher) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = watcher;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    throw std::system_error(errno, std::generic_category(), "epoll_ctl");
  }
}

void Poller::change(int fd, uint32_t events, Watcher* watcher) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = watcher;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void Poller::remove(int fd) {
  if (::getpid() != process_) return;  // a forked child shares the epoll, and must not take anything from it
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
}

int Poller::wait(int timeout_ms) {
  const int count = ::epoll_wait(epoll_.get(), events_.data(), static_cast<int>(events_.size()), timeout_ms);
  return count < 0 ? 0 : count;  // only a signal can do that
}

void Poller::dispatch(int count) {
  for (int i = 0; i < count; ++i) {
    auto* watcher = static_cast<Watcher*>(events_[static_cast<size_t>(i)].data.ptr);
    bool buried = false;
    for (const auto& grave : graves_) buried = buried || grave.get() == watcher;
    if (!buried && watcher != nullptr) watcher->on_event(events_[static_cast<size_t>(i)].events);
  }
  graves_.clear();
}

}  // namespace paceline
