#include "engine/poller.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "common/system_error.h"

namespace paceline {

Poller::Poller(const std::atomic<int>& callers)
    : callers_(callers), epoll_(::epoll_create1(EPOLL_CLOEXEC)), events_(256) {
  if (!epoll_) fail("epoll_create1");
}

void Poller::add(int fd, uint32_t events, Watcher* watcher) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = watcher;
  fds_.insert(fd);
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    const int error = errno;
    fds_.erase(fd);
    fail("epoll_ctl", error);
  }
}

void Poller::change(int fd, uint32_t events, Watcher* watcher) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = watcher;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event) != 0) fail("epoll_ctl");
}

void Poller::remove(int fd) {
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  fds_.erase(fd);
}

void Poller::close_all() {
  for (const int fd : fds_) ::close(fd);
  epoll_.reset();
}

void Poller::add_memory(Watcher* watcher) {
  memories_.push_back(watcher);
  if (asleep_) watcher->fall_asleep();  // it was a caller who found the memory
}

void Poller::ring_all() {
  for (Watcher* watcher : silent_) watcher->wake_other();
  silent_.clear();
}

void Poller::bury(std::unique_ptr<Watcher> watcher) noexcept {
  remove_memory(watcher.get());
  watcher->buried_ = true;
  watcher->next_grave_ = std::move(graves_);
  graves_ = std::move(watcher);
}

bool Poller::fall_asleep() {
  asleep_ = true;
  for (Watcher* memory : memories_) memory->fall_asleep();
  return std::none_of(memories_.begin(), memories_.end(), [](const auto* memory) { return memory->ready(); });
}

void Poller::wait(int timeout_ms) {
  const int count = ::epoll_wait(epoll_.get(), events_.data(), static_cast<int>(events_.size()), timeout_ms);
  num_events_ = static_cast<size_t>(std::max(count, 0));  // less only after a signal
}

template <typename Work>
void Poller::guarded(Watcher& watcher, const Work& work) noexcept {
  try {
    work();
  } catch (const std::exception& thrown) {
    watcher.on_exception(thrown.what());
  } catch (...) {
    watcher.on_exception("an exception that is none of the standard library's");
  }
}

bool Poller::dispatch(Clock::time_point until) {
  waiting_ = false;
  asked_at_ = Clock::now();
  if (num_events_ > 0) heard_at_ = asked_at_;
  wake_up();
  // Not always from the first on: where others keep waiting for the lock, the last would never have their turn.
  const size_t first = rounds_;
  for (size_t i = 0; i < num_events_ && (i == 0 || (!others_wait() && Clock::now() < until)); ++i) {
    const epoll_event& event = events_[(first + i) % num_events_];
    auto* watcher = static_cast<Watcher*>(event.data.ptr);
    if (!watcher->buried_) guarded(*watcher, [&] { watcher->on_event(event.events); });
  }
  return glance() || num_events_ > 0;
}

void Poller::wake_up() {
  if (!asleep_) return;
  for (Watcher* memory : memories_) memory->wake_up();
  asleep_ = false;
}

bool Poller::glance() {
  bool any = false;
  wake_up();
  const size_t first = rounds_++;
  for (size_t i = 0; i < memories_.size(); ++i) {  // which may change meanwhile: who is left out has the next turn
    Watcher* memory = memories_[(first + i) % memories_.size()];
    if (!memory->ready()) continue;
    guarded(*memory, [memory] { memory->on_ready(); });
    any = true;
    if (others_wait()) break;
  }
  // The events of a thread that waits may still name them.
  while (graves_ != nullptr && !waiting_) graves_ = std::move(graves_->next_grave_);
  return any;
}

}  // namespace paceline
