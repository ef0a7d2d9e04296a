#include "engine/engine.h"

#include <pthread.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <system_error>

#include "common/log.h"
#include "transport/shm/shm.h"
#include "transport/tcp/tcp.h"

namespace paceline {
namespace {

constexpr auto kLongestSleep = std::chrono::milliseconds(500);

// Peers of a group that ends have this long to read what we sent and to say goodbye themselves.
constexpr auto kLingering = std::chrono::milliseconds(1000);

}  // namespace

Engine::Entry::Entry(Engine& engine) {
  engine.callers_.fetch_add(1);
  lock_ = std::unique_lock(engine.mutex_);
  engine.callers_.fetch_sub(1);
}

Engine::Bell::Bell() : fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!fd_) throw std::system_error(errno, std::generic_category(), "eventfd");
}

void Engine::Bell::ring() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(fd_.get(), &one, sizeof(one));
}

void Engine::Bell::on_event(uint32_t) {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = ::read(fd_.get(), &count, sizeof(count));
}

Engine::Engine(const EngineOptions& options) : options_(options), introductions_(*this) {
  tcp_ = tcp::create({options.interface, options.hostname});
  introductions_.listen(*tcp_);
  if (options.use_shm) {
    shm_ = shm::create();
    if (shm_ != nullptr) introductions_.listen(*shm_);
  }
  poller_.add(bell_.fd(), EPOLLIN, &bell_);
  thread_ = std::thread([this] { run(); });
}

Engine::~Engine() {
  {
    const Entry entry(*this);
    stopping_ = true;
    bell_.ring();
  }
  thread_.join();
}

PeerAddress Engine::address() const { return {"", tcp_->address(), shm_ != nullptr ? shm_->address() : ""}; }

Transport* Engine::transport_to(const PeerAddress& peer, std::string* address) const {
  if (shm_ != nullptr && shm_->reaches(peer.shm)) {
    *address = peer.shm;
    return shm_.get();
  }
  *address = peer.tcp;
  return tcp_.get();
}

Group* Engine::find(const GroupId& id, uint32_t rank) {
  for (const auto& group : groups_) {
    if (group->membership().id == id && group->rank() == rank && group->failure().empty()) return group.get();
  }
  return nullptr;
}

std::shared_ptr<Group> Engine::join(Membership membership) {
  const Entry entry(*this);
  groups_.push_back(std::make_shared<Group>(*this, std::move(membership)));
  return groups_.back();
}

void Engine::introduce(const std::shared_ptr<Group>& group, std::vector<PeerAddress> addresses) {
  const Entry entry(*this);
  group->introduce(std::move(addresses));
}

void Engine::leave(const std::shared_ptr<Group>& group) {
  std::unique_lock lock(mutex_);
  group->leave();
  wake();
  changed_.wait_for(lock, kLingering, [&] { return group->closed() || stopping_; });
  group->close();
  std::erase(groups_, group);
}

void Engine::abort(const std::shared_ptr<Group>& group, const std::string& reason) {
  const Entry entry(*this);
  group->fail(group->rank(), reason);
}

void Engine::post(const std::shared_ptr<Group>& group, std::shared_ptr<Operation> operation) {
  const Entry entry(*this);
  group->collectives().post(std::move(operation));
}

void Engine::send(const std::shared_ptr<Group>& group, std::shared_ptr<Message> message) {
  const Entry entry(*this);
  group->mailbox().send(std::move(message));
}

void Engine::receive(const std::shared_ptr<Group>& group, std::shared_ptr<Message> message) {
  const Entry entry(*this);
  group->mailbox().receive(std::move(message));
}

std::string Engine::failure(const std::shared_ptr<Group>& group) {
  const Entry entry(*this);
  return group->failure();
}

ScratchPool::Buffer Engine::take_scratch(size_t bytes) {
  const Entry entry(*this);
  return scratch_.take(bytes);
}

void Engine::wake() {
  if (asleep_.load() && !is_progress_thread()) bell_.ring();
}

bool Engine::work() {
  bool worked = false;
  for (size_t i = 0; i < groups_.size(); ++i) {
    const std::shared_ptr<Group> group = groups_[i];
    if (!group->failure().empty()) continue;
    worked = group->collectives().work() || worked;
    if (group->failure().empty()) worked = group->mailbox().work() || worked;
  }
  return worked;
}

// Looks at all deadlines; returns how long to sleep, in milliseconds.
int Engine::tick() {
  const Clock::time_point now = Clock::now();
  Clock::time_point next = std::min(now + kLongestSleep, introductions_.tick(now));
  for (size_t i = 0; i < groups_.size(); ++i) next = std::min(next, groups_[i]->tick(now));
  const auto sleep = std::chrono::ceil<std::chrono::milliseconds>(next - now).count();
  return static_cast<int>(std::clamp<int64_t>(sleep, 0, kLongestSleep.count()));
}

void Engine::run() {
  sigset_t all;
  sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, nullptr);  // signals are the training thread's
  ::pthread_setname_np(::pthread_self(), "paceline");
  std::unique_lock lock(mutex_);
  bool worked = false;
  while (!stopping_) {
    const int timeout_ms = worked ? 0 : tick();
    asleep_ = timeout_ms > 0;
    lock.unlock();
    while (callers_.load() > 0) std::this_thread::yield();
    int count = 0;
    try {
      count = poller_.wait(timeout_ms);
    } catch (const std::system_error& error) {
      log(LogLevel::kError, std::string("the progress thread stops: ") + error.what());
      return;
    }
    lock.lock();
    asleep_ = false;
    poller_.dispatch(count);
    changed_.notify_all();
    worked = work();
  }
}

}  // namespace paceline
