#include "transport/multicast/events.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <utility>

#include "common/attempt.h"
#include "common/system_error.h"

namespace paceline {

EventFd::EventFd() : fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!fd_) paceline::fail("eventfd");
}

void EventFd::ring() const {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(fd_.get(), &one, sizeof(one));
}

void EventFd::quiet() const {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = ::read(fd_.get(), &count, sizeof(count));
}

void MulticastEvents::add(Multicast::Event event) {
  const std::lock_guard lock(mutex_);
  events_.push_back(event);
  if (events_.size() == 1) bell_.ring();
}

void MulticastEvents::add_once(Multicast::Event event) {
  const std::lock_guard lock(mutex_);
  if (std::find(events_.begin(), events_.end(), event) != events_.end()) return;
  events_.push_back(event);
  if (events_.size() == 1) bell_.ring();
}

void MulticastEvents::fail(const std::string& reason) noexcept {
  const bool told = attempt([&] {
    const std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = reason;
  });
  if (told) attempt([&] { add({Multicast::Event::Kind::kFailed, 0}); });
}

std::vector<Multicast::Event> MulticastEvents::take() {
  bell_.quiet();  // before: for an event that comes after it is readable again
  const std::lock_guard lock(mutex_);
  return std::exchange(events_, {});
}

std::string MulticastEvents::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

}  // namespace paceline
