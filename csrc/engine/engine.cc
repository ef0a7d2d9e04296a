#include "engine/engine.h"

#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "common/attempt.h"
#include "common/cores.h"
#include "common/log.h"
#include "common/system_error.h"
#include "transport/pulls.h"
#include "transport/shm/shm.h"
#include "transport/tcp/tcp.h"

namespace paceline {
namespace {

constexpr auto kLongestSleep = std::chrono::milliseconds(500);

// After a caller has polled, the progress thread waits this long for the next one before it polls itself.
constexpr auto kEncore = std::chrono::milliseconds(10);

// Between two turns callers that wait for the lock are let in; after so long the turn goes on all the same.
constexpr auto kLetIn = std::chrono::milliseconds(1);

// A core that is yielded for longer was taken by somebody who computes, which may go on for a while, and a caller that
// is asleep gets the core back sooner: nobody polls for so long, and twice as long each time it is found again.
constexpr auto kLongYield = std::chrono::microseconds(1000);
constexpr std::chrono::milliseconds kComputing{5}, kLongestComputing{160};

// Who is asleep is about to call, too, more often than not: his own thread finds what has come, and need not be woken.
constexpr auto kUnrung = std::chrono::microseconds(100);

// A poller that the system took to another core stays there for so long.
constexpr auto kAway = std::chrono::milliseconds(10);

// Below this a ring that stays in cache is faster than a pull: the kernel pins every page, and the sender waits for it.
constexpr uint64_t kLeastLentBytes = 1 << 20;

// Peers of a group that ends have this long to read what we sent and to say goodbye themselves.
constexpr auto kLingering = std::chrono::milliseconds(1000);
constexpr auto kFinishing = std::chrono::seconds(10);  // for collectives under way when the rank leaves

}  // namespace

// A process that forks has nobody in the middle of something: the child's memory is in order, and it closes its copies
// of all connections. Otherwise peers would not see the end of a rank whose children outlive it.
class Forks {
 public:
  static Forks& instance() {
    static Forks* forks = new Forks;  // outlives static destructors: there may be forks until the end
    return *forks;
  }

  void add(Engine& engine) {
    const std::lock_guard lock(mutex_);
    engines_.push_back(&engine);
  }
  void remove(Engine& engine) {
    const std::lock_guard lock(mutex_);
    std::erase(engines_, &engine);
  }

 private:
  Forks() {
    ::pthread_atfork([] { instance().before(); }, [] { instance().after(false); }, [] { instance().after(true); });
  }
  void before() {
    mutex_.lock();
    for (Engine* engine : engines_) engine->before_fork();
  }
  void after(bool in_child) {
    for (Engine* engine : engines_) engine->after_fork(in_child);
    if (in_child) engines_.clear();
    mutex_.unlock();
  }

  std::mutex mutex_;
  std::vector<Engine*> engines_;
};

void Engine::before_fork() {
  callers_.fetch_add(1);
  mutex_.lock();
  callers_.fetch_sub(1);
}

void Engine::after_fork(bool in_child) {
  if (in_child) {
    forked_ = true;
    poller_.close_all();
    for (const std::shared_ptr<Group>& group : groups_) {
      if (group->multicast() != nullptr) group->multicast()->abandon_in_child();
    }
  }
  mutex_.unlock();
}

void Engine::refuse_in_child() const {
  if (forked_) {
    throw std::runtime_error(
        "a process group cannot be used by a forked child of the process that made it: in the child, call "
        "destroy_process_group() and init_process_group() again, or start it with the spawn method");
  }
}

Engine::Entry::Entry(Engine& engine) : engine_(engine) {
  engine.refuse_in_child();
  engine.callers_.fetch_add(1);
  lock_ = std::unique_lock(engine.mutex_);
  engine.callers_.fetch_sub(1);
}

Engine::Entry::~Entry() {
  const std::vector<std::shared_ptr<void>> retired = std::exchange(engine_.retired_, {});
  engine_.has_retired_ = false;
  lock_.unlock();
}

Engine::Bell::Bell() : fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!fd_) fail("eventfd");
}

void Engine::Bell::ring() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(fd_.get(), &one, sizeof(one));
}

void Engine::Bell::on_event(uint32_t) {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = ::read(fd_.get(), &count, sizeof(count));
}

Engine::Engine(const EngineOptions& options)
    : options_(options), huge_pages_(options.move_to_huge_pages), introductions_(*this) {
  tcp_ = tcp::create({options.interface, options.host_timeout, options.congestion, options.master});
  introductions_.listen(*tcp_);
  if (options.use_shm) {
    shm_ = shm::create();
    if (shm_ != nullptr) introductions_.listen(*shm_);
  }
  poller_.add(bell_.fd(), EPOLLIN, &bell_);
  Forks::instance().add(*this);
  try {
    thread_ = std::thread([this] { run(); });
  } catch (...) {
    Forks::instance().remove(*this);
    throw std::runtime_error(
        "the progress thread of paceline cannot be started: raise the limit of processes (ulimit -u)");
  }
}

void Engine::end(const Engine* engine) {
  if (!engine->forked_) delete engine;
}

Engine::~Engine() {
  Forks::instance().remove(*this);
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

bool Engine::worth_lending(const void* memory, uint64_t bytes) {
  if (bytes < kLeastLentBytes) return false;
  if (options_.lend_all || huge_pages_.hold(memory, bytes)) return true;
  attempt([&] { huge_pages_.count_small(memory); });
  return false;
}

void Engine::improve_memory(const std::vector<Place>& places) {
  if (!huge_pages_.due()) return;
  std::vector<std::pair<const uint8_t*, uint64_t>> chunks;
  for (const Place& place : places) {
    for (const uint8_t* memory : {place.input, static_cast<const uint8_t*>(place.work)}) {
      if (memory != nullptr && place.bytes > 0) chunks.emplace_back(memory, place.bytes);
    }
  }
  std::sort(chunks.begin(), chunks.end());
  chunks.erase(std::unique(chunks.begin(), chunks.end()), chunks.end());
  for (size_t first = 0, next = 0; first < chunks.size(); first = next) {
    uint64_t bytes = 0;  // of chunks that lie one behind the other
    for (next = first; next < chunks.size() && chunks[next].first == chunks[first].first + bytes; ++next) {
      bytes += chunks[next].second;
    }
    for (size_t i = first; i < next; ++i) {
      if (huge_pages_.improve(chunks[i].first, chunks[i].second, chunks[first].first, bytes)) return;
    }
  }
}

Group* Engine::find(const GroupId& id, uint32_t rank) {
  for (const auto& group : groups_) {
    if (group->membership().id == id && group->rank() == rank && !group->left()) return group.get();
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

void Engine::introduce(const std::shared_ptr<Group>& group, uint32_t peer, PeerAddress address) {
  const Entry entry(*this);
  group->introduce(peer, std::move(address));
}

void Engine::spread_by(const std::shared_ptr<Group>& group, std::unique_ptr<Multicast> multicast, PacketRates rates) {
  const Entry entry(*this);
  group->spread_by(std::move(multicast), rates);
}

std::optional<Engine::PacketCounters> Engine::packet_counters(const std::shared_ptr<Group>& group) {
  const Entry entry(*this);
  if (group->multicast() == nullptr) return std::nullopt;
  return PacketCounters{group->multicast()->counters(), group->collectives().spread_counters()};
}

std::string Engine::leave(const std::shared_ptr<Group>& group) {
  if (forked_) return "";                 // the group is the parent's
  std::unique_ptr<MulticastMover> mover;  // destroyed after the lock is given back
  Entry entry(*this);
  // Others need this rank's part of what it has called already.
  wake();
  changed_.wait_for(entry.lock(), kFinishing,
                    [&] { return !group->computes() || !group->failure().empty() || stopping_; });
  const std::string unheard = group->unheard() ? group->failure() : "";
  group->leave();
  wake();
  changed_.wait_for(entry.lock(), kLingering, [&] { return group->closed() || stopping_; });
  group->close();
  mover = group->take_mover();
  std::erase(groups_, group);
  return unheard;
}

void Engine::abort(const std::shared_ptr<Group>& group, const std::string& reason) {
  const Entry entry(*this);
  group->fail(group->rank(), reason);
}

void Engine::post(const std::shared_ptr<Group>& group, const std::shared_ptr<Operation>& operation, bool later) {
  std::optional<std::string> choice;
  refuse_in_child();
  attempt([&] { improve_memory(operation->places); });  // where it cannot be, nothing is lost
  {
    const Entry entry(*this);
    poller_.put_off_rings(!later);
    group->guarded([&] {
      if (operation->number == 0) {
        choice = group->collectives().post(operation);
      } else {
        group->teams().post(operation);
      }
    });
    poller_.put_off_rings(false);
    if (operation->ended) poller_.ring_all();  // nobody waits for it
    group->collectives().end_unposted(operation);
    if (later && group->computes() && !asleep_) wake();
  }
  if (choice) prepare(group, operation, *choice);
}

void Engine::give_up(const std::shared_ptr<Group>& group, uint64_t number, const std::string& reason) {
  const Entry entry(*this);
  group->guarded([&] { group->teams().give_up(number, reason); });
}

void Engine::tidy() {
  if (has_retired_.load(std::memory_order_relaxed) && !forked_) const Entry entry(*this);
}

void Engine::decide_by(const std::shared_ptr<Group>& group, Decisions::Rules rules) {
  const Entry entry(*this);
  group->guarded([&] { group->decisions().decide_by(std::move(rules)); });
}

void Engine::prepare(const std::shared_ptr<Group>& group, const std::shared_ptr<Operation>& operation,
                     const std::string& choice) {
  std::optional<Prepared> prepared;
  std::string error;
  try {
    prepared = operation->prepare(choice, true);
  } catch (const std::exception& thrown) {
    error = thrown.what();
  }
  if (prepared) attempt([&] { improve_memory(prepared->places); });
  const Entry entry(*this);
  group->guarded([&] {
    if (prepared) return group->collectives().begin(operation, std::move(*prepared));
    group->fail(group->rank(), "rank " + std::to_string(group->rank()) + " has no schedule for the decision \"" +
                                   choice + "\": " + error);
  });
  if (!asleep_) wake();
}

void Engine::forecast(const std::shared_ptr<Group>& group) {
  for (;;) {
    std::vector<Decisions::Record> fresh;
    std::function<std::string(const std::vector<Decisions::Record>&)> ask;
    {
      const Entry entry(*this);
      ask = group->decisions().next_question(&fresh);
    }
    if (!ask) return;
    std::string choice;
    try {
      choice = ask(fresh);
    } catch (const std::exception& thrown) {
      log(LogLevel::kWarning, std::string("no forecast of late ranks: ") + thrown.what());
    }
    const Entry entry(*this);
    group->guarded([&] { group->decisions().foresee(choice); });
  }
}

std::vector<Decisions::Record> Engine::arrivals(const std::shared_ptr<Group>& group) {
  const Entry entry(*this);
  return group->decisions().records();
}

void Engine::send(const std::shared_ptr<Group>& group, const std::shared_ptr<Message>& message) {
  const Entry entry(*this);
  group->guarded([&] { group->mailbox().send(message); });
  group->mailbox().end_unposted(message);
  if (!asleep_) wake();
}

void Engine::receive(const std::shared_ptr<Group>& group, const std::shared_ptr<Message>& message) {
  const Entry entry(*this);
  group->guarded([&] { group->mailbox().receive(message); });
  group->mailbox().end_unposted(message);
  if (!asleep_) wake();
}

void Engine::hurry(const std::shared_ptr<Message>& message, std::chrono::milliseconds timeout) {
  const Entry entry(*this);
  if (message->finished || message->timeout) return;
  message->timeout = timeout;
  message->deadline = Clock::now() + timeout;
  due_by(message->deadline);
}

std::string Engine::failure_of(const std::shared_ptr<Group>& group, const std::string& title) {
  const Entry entry(*this);
  return group->failure_of(title);
}

std::string Engine::failure(const std::shared_ptr<Group>& group) {
  const Entry entry(*this);
  return group->failure();
}

ScratchPool::Buffer Engine::take_scratch(size_t bytes) {
  const Entry entry(*this);
  return scratch_.take(bytes);
}

void Engine::nudge() {
  if (asleep_) bell_.ring();
}

void Engine::due_by(Clock::time_point when) {
  if (when >= due_) return;
  due_ = when;
  wake();
}

void Engine::look_again() {
  const Entry entry(*this);
  nudge();
}

void Engine::retire(std::shared_ptr<void> ended) noexcept {
  has_retired_ = attempt([&] { retired_.push_back(std::move(ended)); }) || has_retired_;
}

void Engine::wake() {
  if (asleep_) {
    bell_.ring();
  } else if (parked_ && !helping_) {
    attended_ = true;
    unparked_.notify_one();
  }
}

bool Engine::busy() const {
  return std::any_of(groups_.begin(), groups_.end(), [](const auto& group) { return group->busy(); });
}

Engine::Helping::Helping(Engine& engine) : engine_(engine) { engine.helping_ = true; }

Engine::Helping::~Helping() {
  engine_.poller_.ring_all();
  engine_.helping_ = false;
  engine_.helped_at_ = Clock::now();
  // A progress thread that was left in epoll sleeps on: others must wake it again.
  engine_.asleep_ = engine_.poller_.is_waiting();
  const bool missed = engine_.asleep_ && (!engine_.poller_.fall_asleep() || engine_.due_ < engine_.asleep_until_);
  if (missed || engine_.busy()) engine_.wake();
}

void Engine::help(const std::atomic<bool>& done, Clock::time_point until, const Waiting& waiting) {
  Entry entry(*this);
  crowded_ = waiting.core >= 0;
  if (helping_ || done || stopping_) return poller_.ring_all();
  const Helping helping(*this);
  Clock::time_point now = Clock::now();
  const bool again = now < helped_at_ + kEncore;  // others will follow: the progress thread parks for a while
  if (again || !poller_.has_memory()) take_over(entry.lock());
  Clock::time_point polls_until = now < yields_from_ ? now : now + waiting.polls;
  const Clock::time_point rings_from = now + kUnrung;
  bool worked = true;  // posting may have left some: look before sleeping
  while (!done && now < until) {
    int timeout_ms = 0;
    const bool polls = now < polls_until;
    if (now >= rings_from || !polls) poller_.ring_all();
    if (now >= due_) {
      tick(now);
      if (done) break;
    }
    if (!worked && !polls) {
      take_over(entry.lock());
      if (done) break;
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - now).count();
      timeout_ms = static_cast<int>(std::min<int64_t>(sleep_ms(now), left));
    }
    worked = turn(entry.lock(), timeout_ms, now, !parked_);
    if (polls && (worked || done)) computing_ = {};
    if (done) break;
    const Clock::time_point begin = now;
    now = polls && !worked ? yield(entry.lock(), waiting.core, begin) : Clock::now();
    if (polls && !worked && now - begin >= kLongYield) {
      computing_ = std::clamp(2 * computing_, kComputing, kLongestComputing);
      yields_from_ = now + computing_;
      polls_until = begin;
    }
  }
}

void Engine::take_over(std::unique_lock<std::mutex>& lock) {
  if (parked_) return;
  bell_.ring();
  changed_.wait(lock, [this] { return parked_; });
}

// Lets whoever waits for this core have it; returns when that was over.
Clock::time_point Engine::yield(std::unique_lock<std::mutex>& lock, int core, Clock::time_point now) {
  lock.unlock();
  if (core >= 0 && ::sched_getcpu() != core && now >= moved_at_ + kAway) {
    move_to(core);
    moved_at_ = now;
  }
  std::this_thread::yield();
  const Clock::time_point end = Clock::now();
  lock.lock();
  return end;
}

// Looks at all deadlines.
void Engine::tick(Clock::time_point now) {
  due_ = now + kLongestSleep;
  due_ = std::min(due_, introductions_.tick(now));
  for (size_t i = 0; i < groups_.size(); ++i) {
    Group& group = *groups_[i];
    group.guarded([&] { due_ = std::min(due_, group.tick(now)); });
  }
}

int Engine::sleep_ms(Clock::time_point now) const {
  const auto sleep = std::chrono::ceil<std::chrono::milliseconds>(due_ - now).count();
  return static_cast<int>(std::clamp<int64_t>(sleep, 0, kLongestSleep.count()));
}

bool Engine::has_work() const {
  return std::any_of(groups_.begin(), groups_.end(), [](const auto& group) { return group->has_work(); });
}

bool Engine::turn(std::unique_lock<std::mutex>& lock, int timeout_ms, Clock::time_point now, bool beside) {
  if (has_work() || (timeout_ms > 0 && !poller_.fall_asleep())) timeout_ms = 0;
  asleep_ = timeout_ms > 0;
  const bool glances = beside || (timeout_ms == 0 && poller_.may_glance(now));
  if (!glances) {
    asleep_until_ = now + std::chrono::milliseconds(timeout_ms);
    poller_.prepare_wait();
  }
  const bool gives_way = crowded_ && has_work();
  lock.unlock();
  if (gives_way) std::this_thread::yield();  // another rank of this core may have something small to do
  for (const auto until = now + kLetIn; callers_.load() > 0 && Clock::now() < until;) std::this_thread::yield();
  if (!glances) poller_.wait(timeout_ms);
  lock.lock();
  asleep_ = false;
  bool worked = glances ? poller_.glance() : poller_.dispatch(due_);
  for (size_t i = 0; i < groups_.size(); ++i) {
    Group& group = *groups_[i];
    group.guarded([&] {
      worked = group.work() || worked;
      group.flush_marked();
    });
  }
  changed_.notify_all();
  return worked;
}

// While callers poll, and for a moment after: the next one will come soon.
void Engine::park(std::unique_lock<std::mutex>& lock) {
  parked_ = true;
  changed_.notify_all();
  for (;;) {
    const Clock::time_point until = std::min(helped_at_ + kEncore, due_);
    if (stopping_ || (!helping_ && (attended_ || Clock::now() >= until))) break;
    unparked_.wait_until(lock, helping_ ? Clock::now() + kEncore : until);
  }
  parked_ = false;
  attended_ = false;
}

void Engine::run() {
  sigset_t all;
  sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, nullptr);  // signals are the training thread's
  ::pthread_setname_np(::pthread_self(), "paceline");
  std::unique_lock lock(mutex_);
  bool worked = false;
  while (!stopping_) {
    if (helping_) {
      park(lock);
      worked = true;
    }
    poller_.ring_all();  // whose caller did not come to wait
    const Clock::time_point now = Clock::now();
    if (now >= due_) tick(now);
    worked = turn(lock, worked ? 0 : sleep_ms(now), now);
  }
}

}  // namespace paceline
