#include "engine/poller.h"

#include <algorithm>
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

void Poller::add_memory(Watcher* watcher) {
  memories_.push_back(watcher);
  if (asleep_) watcher->fall_asleep();  // it was a caller who found the memory
}

void Poller::bury(std::unique_ptr<Watcher> watcher) {
  remove_memory(watcher.get());
  graves_.push_back(std::move(watcher));
}

bool Poller::fall_asleep() {
  asleep_ = true;
  for (Watcher* memory : memories_) memory->fall_asleep();
  return std::none_of(memories_.begin(), memories_.end(), [](const auto* memory) { return memory->ready(); });
}

int Poller::wait(int timeout_ms) {
  const int count = ::epoll_wait(epoll_.get(), events_.data(), static_cast<int>(events_.size()), timeout_ms);
  asked_at_ = Clock::now();
  if (count > 0) heard_at_ = asked_at_;
  return count < 0 ? 0 : count;  // only a signal can do that
}

bool Poller::dispatch(int count) {
  bool any = count > 0;
  if (asleep_) {
    for (Watcher* memory : memories_) memory->wake_up();
    asleep_ = false;
  }
  for (int i = 0; i < count; ++i) {
    auto* watcher = static_cast<Watcher*>(events_[static_cast<size_t>(i)].data.ptr);
    bool buried = false;
    for (const auto& grave : graves_) buried = buried || grave.get() == watcher;
    if (!buried && watcher != nullptr) watcher->on_event(events_[static_cast<size_t>(i)].events);
  }
  for (size_t i = 0; i < memories_.size(); ++i) {  // which may change meanwhile: who is left out has the next turn
    if (!memories_[i]->ready()) continue;
    memories_[i]->on_ready();
    any = true;
  }
  graves_.clear();
  return any;
}

}  // namespace paceline
