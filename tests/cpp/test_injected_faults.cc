// Every allocation, system call and thread of a small job fails once, one after the other: each rank gets an error or
// the right result, nobody waits for ever, and the process lives.
//
// The linker sends the core's system calls through the functions below (--wrap, see CMakeLists.txt). Only what the
// engine does counts: its own threads, and the calls that this file makes inside `Inside`.
#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <thread>

#include "common/log.h"
#include "ranks.h"

namespace {

enum Target {
  kAllocation,
  kThread,
  kSocket,
  kConnect,
  kAccept,
  kWatch,
  kReadv,
  kRead,
  kSend,
  kSendmsg,
  kRecvmsg,
  kRecv,
  kMemfd,
  kMmap,
  kTruncate,
  kFcntl,
  kEventfd,
  kEpoll,
  kVmRead,
  kBind,
  kListen,
  kRandom,
  kNumTargets
};

struct Kind {
  const char* name;
  int error;
};
constexpr std::array<Kind, kNumTargets> kKinds = {{{"operator new", 0},
                                                   {"pthread_create", EAGAIN},
                                                   {"socket", EMFILE},
                                                   {"connect", ENOBUFS},
                                                   {"accept4", EMFILE},
                                                   {"epoll_ctl", ENOMEM},
                                                   {"readv", ENOMEM},
                                                   {"read", ENOMEM},
                                                   {"send", ENOBUFS},
                                                   {"sendmsg", ENOMEM},
                                                   {"recvmsg", ENOMEM},
                                                   {"recv", ENOMEM},
                                                   {"memfd_create", EMFILE},
                                                   {"mmap", ENOMEM},
                                                   {"ftruncate", ENOSPC},
                                                   {"fcntl", ENOMEM},
                                                   {"eventfd", EMFILE},
                                                   {"epoll_create1", EMFILE},
                                                   {"process_vm_readv", ENOMEM},
                                                   {"bind", EADDRINUSE},
                                                   {"listen", ENOMEM},
                                                   {"getrandom", EAGAIN}}};

const std::thread::id main_thread = std::this_thread::get_id();
thread_local bool inside = false;
std::atomic<int> target{-1};
std::atomic<int64_t> countdown{0};  // the call at which it reaches -1 fails

class Inside {
 public:
  Inside() { inside = true; }
  ~Inside() { inside = false; }
};

bool fails(Target which) {
  if (target.load(std::memory_order_relaxed) != which) return false;
  if (std::this_thread::get_id() == main_thread && !inside) return false;
  return countdown.fetch_sub(1) == 0;
}

template <typename Result>
bool refused(Target which, Result* result) {
  if (!fails(which)) return false;
  errno = kKinds[which].error;
  *result = (Result)-1;  // NOLINT: of a number or, for mmap, a pointer
  return true;
}

}  // namespace

void* operator new(size_t size) {
  if (fails(kAllocation)) throw std::bad_alloc();
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"  // it sees only one of the two inlined
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

// The standard library starts threads by this, not the core: found first, as this is the program itself.
extern "C" __attribute__((visibility("default"))) int pthread_create(pthread_t* thread,
                                                                     const pthread_attr_t* attributes,
                                                                     void* (*run)(void*), void* argument) {
  if (fails(kThread)) return kKinds[kThread].error;
  static const auto real = reinterpret_cast<decltype(&pthread_create)>(::dlsym(RTLD_NEXT, "pthread_create"));
  return real(thread, attributes, run, argument);
}

// Those with a fixed list of arguments.
#define INJECTED(Result, name, which, parameters, arguments)           \
  extern "C" Result __real_##name parameters;                          \
  extern "C" Result __wrap_##name parameters;                          \
  extern "C" Result __wrap_##name parameters {                         \
    Result result{};                                                   \
    return refused(which, &result) ? result : __real_##name arguments; \
  }

INJECTED(int, socket, kSocket, (int domain, int type, int protocol), (domain, type, protocol))
INJECTED(int, connect, kConnect, (int fd, const sockaddr* to, socklen_t length), (fd, to, length))
INJECTED(int, accept4, kAccept, (int fd, sockaddr* from, socklen_t* length, int flags), (fd, from, length, flags))
INJECTED(int, epoll_ctl, kWatch, (int epoll, int what, int fd, epoll_event* event), (epoll, what, fd, event))
INJECTED(ssize_t, readv, kReadv, (int fd, const iovec* parts, int count), (fd, parts, count))
INJECTED(ssize_t, read, kRead, (int fd, void* to, size_t bytes), (fd, to, bytes))
INJECTED(ssize_t, send, kSend, (int fd, const void* from, size_t bytes, int flags), (fd, from, bytes, flags))
INJECTED(ssize_t, sendmsg, kSendmsg, (int fd, const msghdr* message, int flags), (fd, message, flags))
INJECTED(ssize_t, recvmsg, kRecvmsg, (int fd, msghdr* message, int flags), (fd, message, flags))
INJECTED(ssize_t, recv, kRecv, (int fd, void* to, size_t bytes, int flags), (fd, to, bytes, flags))
INJECTED(int, memfd_create, kMemfd, (const char* name, unsigned flags), (name, flags))
INJECTED(void*, mmap, kMmap, (void* at, size_t bytes, int rights, int flags, int fd, off_t offset),
         (at, bytes, rights, flags, fd, offset))
INJECTED(int, ftruncate, kTruncate, (int fd, off_t bytes), (fd, bytes))
INJECTED(int, eventfd, kEventfd, (unsigned count, int flags), (count, flags))
INJECTED(int, epoll_create1, kEpoll, (int flags), (flags))
INJECTED(ssize_t, process_vm_readv, kVmRead,
         (pid_t process, const iovec* to, unsigned long to_count, const iovec* from, unsigned long from_count,
          unsigned long flags),
         (process, to, to_count, from, from_count, flags))
INJECTED(int, bind, kBind, (int fd, const sockaddr* address, socklen_t length), (fd, address, length))
INJECTED(int, listen, kListen, (int fd, int backlog), (fd, backlog))
INJECTED(ssize_t, getrandom, kRandom, (void* to, size_t bytes, unsigned flags), (to, bytes, flags))

extern "C" int __real_fcntl(int fd, int what, ...);
extern "C" int __wrap_fcntl(int fd, int what, ...);
extern "C" int __wrap_fcntl(int fd, int what, ...) {
  int result = 0;
  if (refused(kFcntl, &result)) return result;
  va_list list;
  va_start(list, what);
  const int argument = va_arg(list, int);
  va_end(list);
  return __real_fcntl(fd, what, argument);
}

namespace paceline::testing {
namespace {

using namespace std::chrono_literals;

// How something ended, told without an allocation.
struct Outcome {
  std::atomic<bool> done{false};
  std::array<char, 256> error{};

  std::function<void(const std::string&)> teller() {
    return [this](const std::string& text) {
      std::strncpy(error.data(), text.c_str(), error.size() - 1);
      EXPECT_FALSE(done.exchange(true)) << "told twice";
    };
  }
  bool right() const { return done && error[0] == '\0'; }
};

// Two ranks: they meet, decide, reduce a large and a small buffer and one as a team, exchange a large and a small
// message, and part.
class Scenario {
 public:
  explicit Scenario(bool shm)
      : shm_(shm),
        jobs_{{{swap_all_reduce(), Kind::kAllReduce, 2, 600000, 1},
               {swap_all_reduce(), Kind::kAllReduce, 2, 10, 2},
               {swap_all_reduce(), Kind::kAllReduce, 2, 50000, 3}}},
        sent_{random_bytes(200000, 1), random_bytes(100, 2)},
        received_{std::vector<uint8_t>(200000), std::vector<uint8_t>(100)} {}

  // Where the first call that must succeed throws, the job is over: that is an error, too.
  void run() {
    try {
      meet();
      work();
    } catch (const std::exception& error) {
      EXPECT_STRNE(error.what(), "");
      given_up_ = true;
    }
    part();
  }

  // Whether whatever ended well has the right result.
  void check() {
    for (const auto& rank : outcomes_) {
      for (const Outcome& outcome : rank) {
        EXPECT_TRUE(given_up_ || outcome.done) << "somebody waits for ever";
      }
    }
    EXPECT_FALSE(hangs_) << "somebody waits until the group ends";
    for (size_t i = 0; i < jobs_.size(); ++i) {
      EXPECT_TRUE(!outcomes_[0][i].right() || !outcomes_[1][i].right() || jobs_[i].right());
    }
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_TRUE(!outcomes_[1][3 + i].right() || received_[i] == sent_[i]);
    }
  }

 private:
  void meet() {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      const EngineOptions options{"lo", shm_, true};
      const Inside counted;
      engines_[rank] = std::make_unique<Engine>(options);
    }
    Membership member = membership(0, 2);
    std::vector<PeerAddress> addresses;
    for (const auto& engine : engines_) {
      addresses.push_back(engine->address());
      addresses.back().host = "host";
    }
    for (uint32_t rank = 0; rank < 2; ++rank) {
      member.rank = rank;
      const Inside counted;
      groups_[rank] = engines_[rank]->join(member);
    }
    for (uint32_t rank = 0; rank < 2; ++rank) {
      const Inside counted;
      engines_[rank]->introduce(groups_[rank], addresses);
    }
    for (uint32_t rank = 0; rank < 2; ++rank) {
      Decisions::Rules rules;
      rules.enabled = true;
      rules.elsewhere = [](const std::function<void()>& task) { task(); };
      const Inside counted;
      engines_[rank]->decide_by(groups_[rank], std::move(rules));
    }
  }

  void work() {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      for (size_t i = 0; i < jobs_.size(); ++i) {
        const auto operation = jobs_[i].operation(rank);
        operation->timeout = 20s;
        operation->on_done = outcomes_[rank][i].teller();
        if (i == 1) {  // the small one awaits a decision
          operation->prepare = [program = operation->program, places = operation->places](
                                   const std::string&, bool) -> std::optional<Prepared> {
            return Prepared{program, places};
          };
          operation->program.reset();
          operation->places.clear();
        }
        if (i == 2) operation->number = kFirstOfTeams + 1;
        const Inside counted;
        engines_[rank]->post(groups_[rank], operation, true);
      }
      for (size_t i = 0; i < 2; ++i) {
        const auto message = std::make_shared<Message>();
        std::vector<uint8_t>& bytes = (rank == 0 ? sent_ : received_)[i];
        message->peer = 1 - rank;
        message->tag = static_cast<uint32_t>(i);
        message->data = bytes.data();
        message->bytes = bytes.size();
        message->timeout = 20s;
        message->on_done = outcomes_[rank][3 + i].teller();
        const Inside counted;
        rank == 0 ? engines_[rank]->send(groups_[rank], message) : engines_[rank]->receive(groups_[rank], message);
      }
    }
    const auto until = Clock::now() + 10s;
    for (const auto& rank : outcomes_) {
      for (const Outcome& outcome : rank) {
        while (!outcome.done && Clock::now() < until) std::this_thread::sleep_for(100us);
        hangs_ = hangs_ || !outcome.done;
      }
    }
  }

  void part() {
    std::vector<std::thread> leaving;  // at once: each waits for the other's goodbye
    for (uint32_t rank = 0; rank < 2; ++rank) {
      if (groups_[rank] == nullptr) continue;
      leaving.emplace_back([this, rank] {
        try {
          engines_[rank]->leave(groups_[rank]);
        } catch (const std::exception& error) {
          EXPECT_STRNE(error.what(), "");
        }
      });
    }
    for (std::thread& thread : leaving) thread.join();
    for (auto& group : groups_) group.reset();
    for (auto& engine : engines_) engine.reset();
  }

  bool shm_;
  bool given_up_ = false;
  bool hangs_ = false;
  std::array<Job, 3> jobs_;
  std::array<std::vector<uint8_t>, 2> sent_, received_;
  std::array<std::array<Outcome, 5>, 2> outcomes_;
  std::array<std::unique_ptr<Engine>, 2> engines_;
  std::array<std::shared_ptr<Group>, 2> groups_;
};

class InjectedFaults : public ::testing::TestWithParam<std::tuple<int, bool>> {};

INSTANTIATE_TEST_SUITE_P(Core, InjectedFaults,
                         ::testing::Combine(::testing::Range(0, static_cast<int>(kNumTargets)), ::testing::Bool()),
                         [](const auto& info) {
                           std::string name = kKinds[static_cast<size_t>(std::get<0>(info.param))].name;
                           std::replace(name.begin(), name.end(), ' ', '_');
                           return name + (std::get<1>(info.param) ? "_shm" : "_tcp");
                         });

// EFFORT=20 tries every call; by default every so many, and all of the first ones.
TEST_P(InjectedFaults, EverybodyGetsAnErrorOrTheRightResult) {
  const auto [which, shm] = GetParam();
  const bool all = std::getenv("EFFORT") != nullptr;
  set_log_level(LogLevel::kOff);
  int64_t tried = 0;
  for (int64_t call = 0;; call += all || call < 20 ? 1 : 1 + call / 20, ++tried) {
    Scenario scenario(shm);
    countdown = call;
    target = which;
    scenario.run();
    target = -1;
    scenario.check();
    if (HasFailure()) FAIL() << kKinds[static_cast<size_t>(which)].name << ", call " << call;
    if (countdown >= 0) break;  // there are no more calls to fail
  }
  RecordProperty("tried", static_cast<int>(tried));
}

}  // namespace
}  // namespace paceline::testing
