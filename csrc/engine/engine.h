// The engine of a process: one progress thread that owns all sockets, and one lock for everything it touches.
//
// Callers post under the lock and do the first work themselves, so that a small collective need not wake a thread; the
// progress thread does the rest, blocking in epoll. It also answers for a rank whose training thread is late.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/group.h"
#include "engine/introductions.h"
#include "engine/poller.h"
#include "engine/scratch.h"
#include "transport/transport.h"

namespace paceline {

struct EngineOptions {
  std::string interface;  // to listen on; empty: by the host's name
  std::string hostname;
  bool use_shm = true;    // pull payload between ranks of one host

  bool operator==(const EngineOptions&) const = default;
};

class Engine {
 public:
  explicit Engine(const EngineOptions& options);
  ~Engine();

  const EngineOptions& options() const { return options_; }

  // This process's addresses, to be published.
  PeerAddress address() const;

  // Members may connect from now on; say where they are before the first operation.
  std::shared_ptr<Group> join(Membership membership);
  void introduce(const std::shared_ptr<Group>& group, std::vector<PeerAddress> addresses);
  // Tells the peers, waits a moment until they have read everything, and forgets the group.
  void leave(const std::shared_ptr<Group>& group);
  // Ends everything in flight with this reason.
  void abort(const std::shared_ptr<Group>& group, const std::string& reason);

  void post(const std::shared_ptr<Group>& group, std::shared_ptr<Operation> operation);
  void send(const std::shared_ptr<Group>& group, std::shared_ptr<Message> message);
  void receive(const std::shared_ptr<Group>& group, std::shared_ptr<Message> message);
  std::string failure(const std::shared_ptr<Group>& group);
  ScratchPool::Buffer take_scratch(size_t bytes);

  // Under the lock, for the parts of the engine.
  Poller& poller() { return poller_; }
  ScratchPool& scratch() { return scratch_; }
  Introductions& introductions() { return introductions_; }
  Transport* transport_to(const PeerAddress& peer, std::string* address) const;
  Group* find(const GroupId& id, uint32_t rank);
  void wake();
  bool is_progress_thread() const { return std::this_thread::get_id() == thread_.get_id(); }

 private:
  // The lock for callers: the progress thread lets them in between two pieces of work.
  class Entry {
   public:
    explicit Entry(Engine& engine);

   private:
    std::unique_lock<std::mutex> lock_;
  };

  class Bell final : public Watcher {
   public:
    Bell();
    int fd() const { return fd_.get(); }
    void ring();
    void on_event(uint32_t events) override;

   private:
    Fd fd_;
  };

  void run();
  bool work();
  int tick();

  EngineOptions options_;
  std::mutex mutex_;
  std::atomic<int> callers_{0};
  std::condition_variable changed_;
  Poller poller_;
  ScratchPool scratch_;
  std::unique_ptr<Transport> tcp_, shm_;
  Introductions introductions_;
  Bell bell_;
  std::atomic<bool> asleep_{false};
  std::vector<std::shared_ptr<Group>> groups_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace paceline
