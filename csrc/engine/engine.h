// The engine of a process: one progress thread that owns all sockets, and one lock for everything it touches.
//
// Callers post under the lock and do the first work themselves; the progress thread does the rest, blocking in epoll.
// It also answers for a rank whose training thread is late. A caller that waits for its own operation has nothing
// better to do than the progress thread's work, which saves waking one thread to wake another: it takes over the
// poller, and the progress thread parks until nobody has waited for a moment.
//
//   who polls         until
//   progress thread   a caller waits: it is called out of epoll, and parks
//   waiting caller    its operation is done; others that wait meanwhile sleep
//   both              a caller that waits for the first time in kEncore leaves the progress thread in epoll, and looks
//   at
//                     memory only, as long as it polls: most collectives of one host end before a thread could park
//   nobody            an operation is posted for later, work is left, or kEncore is over: the progress thread again
//
// The lock is held for a slice of work at most: reads, reductions, pulls and the last touches to results end early, or
// go on in the next turn, where callers wait for it. An exception ends where the work for a group began, and fails that
// group; one on the way in (a call) fails the group too, if others may have seen part of the call.
//
// A forked child has the memory, but not the thread: its copy of an engine has no connections, and refuses every call.
#pragma once

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "engine/group.h"
#include "engine/introductions.h"
#include "engine/poller.h"
#include "engine/scratch.h"
#include "transport/huge_pages.h"
#include "transport/transport.h"

namespace paceline {

struct EngineOptions {
  std::string interface;                  // to listen on; empty: one that other hosts reach
  bool use_shm = true;                    // share memory between ranks of one host
  bool lend_all = false;                  // large payload is pulled by ranks of one host also where that is slower
  bool move_to_huge_pages = true;         // buffers that come back (transport/huge_pages.h)
  std::chrono::seconds host_timeout{10};  // a host that has not answered for so long is lost; 0: never
  // TCP's congestion control, as the kernel names it; empty: the system's own.
  std::string congestion = {};  // NOLINT(readability-redundant-member-init): others need not name it
  // The host of the job's store, which the others reach, too; empty: not known.
  std::string master = {};  // NOLINT(readability-redundant-member-init): others need not name it
};

// How a caller waits: for so long it polls before it sleeps, and lets others have the core between two looks.
struct Waiting {
  std::chrono::microseconds polls{0};
  // The one to poll on where ranks share cores: the system leaves pollers where they are, and three of four ranks on
  // one core are much slower than two on each of two.
  int core = -1;  // any
};

class Engine {
 public:
  explicit Engine(const EngineOptions& options);
  ~Engine();
  // In a forked child an engine must not be destroyed, but left as it is: this is what ends a shared one.
  static void end(const Engine* engine);

  // Throws in a forked child, and tells what to do there.
  void refuse_in_child() const;

  // This process's addresses, to be published.
  PeerAddress address() const;

  // Members may connect from now on; say where they are before the first operation.
  std::shared_ptr<Group> join(Membership membership);
  void introduce(const std::shared_ptr<Group>& group, std::vector<PeerAddress> addresses);
  void introduce(const std::shared_ptr<Group>& group, uint32_t peer, PeerAddress address);
  // From now on the group's transfers with many destinations go by multicast; see Group.
  void spread_by(const std::shared_ptr<Group>& group, std::unique_ptr<Multicast> multicast, PacketRates rates);
  // What was sent and received that way, and what had to be sent again; nothing where there is no multicast.
  struct PacketCounters {
    Multicast::Counters packets;
    Spreads::Counters spreads;
  };
  std::optional<PacketCounters> packet_counters(const std::shared_ptr<Group>& group);
  // Tells the peers, waits a moment until they have read everything, and forgets the group.
  // Returns what ranks disagree about, if no caller of this rank was told.
  std::string leave(const std::shared_ptr<Group>& group);
  // Ends everything in flight with this reason.
  void abort(const std::shared_ptr<Group>& group, const std::string& reason);

  // `later`: nobody is going to wait for it at once.
  void post(const std::shared_ptr<Group>& group, const std::shared_ptr<Operation>& operation, bool later);
  // Ends the operation of a team on all its members, also if this rank has not called it.
  void give_up(const std::shared_ptr<Group>& group, uint64_t number, const std::string& reason);
  // Lets go of operations that have ended, if there are any.
  void tidy();
  // How operations of the group that await a decision get one; before that is said, they wait.
  void decide_by(const std::shared_ptr<Group>& group, Decisions::Rules rules);
  // Outside the lock: makes the program for a choice and begins the operation.
  void prepare(const std::shared_ptr<Group>& group, const std::shared_ptr<Operation>& operation,
               const std::string& choice);
  // Outside the lock: asks for a forecast from what has been seen.
  void forecast(const std::shared_ptr<Group>& group);
  // Who arrived when, on the coordinator.
  std::vector<Decisions::Record> arrivals(const std::shared_ptr<Group>& group);

  void send(const std::shared_ptr<Group>& group, const std::shared_ptr<Message>& message);
  void receive(const std::shared_ptr<Group>& group, const std::shared_ptr<Message>& message);
  // Somebody waits for it from now on: it ends within this time.
  void hurry(const std::shared_ptr<Message>& message, std::chrono::milliseconds timeout);
  // Does the progress thread's work until `done` or the time is over, or returns at once when another caller does.
  void help(const std::atomic<bool>& done, Clock::time_point until, const Waiting& waiting);
  std::string failure(const std::shared_ptr<Group>& group);
  // The same, for a caller with something of this title.
  std::string failure_of(const std::shared_ptr<Group>& group, const std::string& title);
  ScratchPool::Buffer take_scratch(size_t bytes);
  // What a caller waits for has ended elsewhere: whoever sleeps for it looks again.
  void look_again();

  // Under the lock, for the parts of the engine.
  Poller& poller() { return poller_; }
  ScratchPool& scratch() { return scratch_; }
  std::chrono::seconds host_timeout() const { return options_.host_timeout; }
  // Whether there are more ranks than cores.
  bool crowded() const { return crowded_; }
  // Whether a peer that can read this memory had better do so.
  bool worth_lending(const void* memory, uint64_t bytes);
  Introductions& introductions() { return introductions_; }
  Transport* transport_to(const PeerAddress& peer, std::string* address) const;
  Group* find(const GroupId& id, uint32_t rank);
  void wake();
  // An operation has ended whose caller may be asleep in epoll, or there is work that nothing but a turn will do.
  void nudge();
  // Deadlines must be looked at by then.
  void due_by(Clock::time_point when);
  // What has ended is let go of by the next caller, outside the lock: to destroy a tensor may need Python's lock.
  void retire(std::shared_ptr<void> ended) noexcept;

 private:
  // The lock for callers: the progress thread lets them in between two pieces of work.
  class Entry {
   public:
    explicit Entry(Engine& engine);
    ~Entry();
    std::unique_lock<std::mutex>& lock() { return lock_; }

   private:
    Engine& engine_;
    std::unique_lock<std::mutex> lock_;
  };

  // A caller polls. Whatever ends that, the progress thread can go on.
  class Helping {
   public:
    explicit Helping(Engine& engine);
    ~Helping();

   private:
    Engine& engine_;
  };

  class Bell final : public Watcher {
   public:
    Bell();
    int fd() const { return fd_.get(); }
    void ring();
    void on_event(uint32_t events) override;
    void on_exception(const char* /*what*/) noexcept override {}

   private:
    Fd fd_;
  };

  // On the caller's thread, without the lock: moves one chunk to huge pages, if one is due.
  void improve_memory(const std::vector<Place>& places);
  void run();
  // Calls the progress thread out of epoll, and waits until it is parked.
  void take_over(std::unique_lock<std::mutex>& lock);
  void park(std::unique_lock<std::mutex>& lock);
  // One turn of whoever polls; returns whether anything had happened. `beside` the progress thread, which is in epoll,
  // it looks at memory only.
  bool turn(std::unique_lock<std::mutex>& lock, int timeout_ms, Clock::time_point now, bool beside = false);
  Clock::time_point yield(std::unique_lock<std::mutex>& lock, int core, Clock::time_point now);
  bool busy() const;
  bool has_work() const;
  void tick(Clock::time_point now);
  int sleep_ms(Clock::time_point now) const;

  friend class Forks;
  void before_fork();
  void after_fork(bool in_child);

  EngineOptions options_;
  std::mutex mutex_;
  std::atomic<int> callers_{0};
  std::condition_variable changed_;
  Poller poller_{callers_};
  ScratchPool scratch_;
  HugePages huge_pages_;
  std::unique_ptr<Transport> tcp_, shm_;
  Introductions introductions_;
  Bell bell_;
  bool asleep_ = false;  // whoever polls is in epoll, and nobody looks at memory
  Clock::time_point asleep_until_;
  bool crowded_ = false;
  bool parked_ = false;
  bool helping_ = false;
  bool attended_ = false;  // the progress thread is asked to poll at once
  Clock::time_point due_;  // deadlines are looked at then
  Clock::time_point helped_at_;
  Clock::time_point moved_at_;              // to the core to poll on
  Clock::time_point yields_from_;           // others need the cores until then
  std::chrono::milliseconds computing_{0};  // for how long, when that was found last
  std::condition_variable unparked_;
  std::vector<std::shared_ptr<Group>> groups_;
  bool stopping_ = false;
  std::vector<std::shared_ptr<void>> retired_;
  std::atomic<bool> has_retired_{false};
  std::atomic<bool> forked_{false};  // this is a child's copy
  std::thread thread_;
};

}  // namespace paceline
