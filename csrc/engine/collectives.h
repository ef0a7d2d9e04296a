// Runs the collectives of one group, or the one of a team (teams.h): which bytes may go out, where arriving bytes
// belong, what they let go on. It knows no algorithm: programs say everything.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/connection.h"
#include "engine/operation.h"
#include "engine/spreads.h"

namespace paceline {

class Group;

// What ends when something goes wrong with a collective: the group, or a team.
class Owner {
 public:
  // Why it has failed, or an empty string.
  virtual const std::string& failure() const = 0;
  // The first reason counts. `culprit` is the rank to blame, or -1; `disputed` the collective that ranks disagree
  // about, if that is the reason.
  virtual void fail(int64_t culprit, std::string reason, uint64_t disputed = 0) noexcept = 0;
  // What to tell the caller of what has this title.
  virtual std::string failure_of(const std::string& title) = 0;

 protected:
  ~Owner() = default;
};

class Collectives {
 public:
  // They are counted from `first` on, and their frames have a lane for themselves.
  Collectives(Group& group, Owner& owner, Lane lane, uint64_t first = 1)
      : group_(group), owner_(owner), lane_(lane), next_seq_(first) {}

  // Of an operation that awaits a decision: the choice, if it is made but its program is not; then the caller prepares.
  std::optional<std::string> post(const std::shared_ptr<Operation>& operation);
  // After a call that was broken off: an operation that the group does not know of ends as well.
  void end_unposted(const std::shared_ptr<Operation>& operation) noexcept;
  // It has been decided how an operation runs.
  void begin(const std::shared_ptr<Operation>& operation, Prepared prepared);

  FrameHandler::Verdict on_header(Connection& connection, const FrameHeader& header, uint8_t** to);
  void on_frame(Connection& connection, const FrameHeader& header, const uint8_t* bytes);
  void on_sent(Connection& connection, const OutFrame& frame);
  void on_room(Connection& connection);
  // Sends that gave way to others for too long go on. Returns when to be called again.
  Clock::time_point tick(Clock::time_point now);

  // One slice of what needs nothing from outside any more: results to be made final, frames that came before their
  // call, memory that a peer has lent. False when there is none.
  bool work();
  bool has_work() const { return !epilogues_.empty() || !replays_.empty() || !pulls_.empty(); }

  bool idle() const { return operations_.empty(); }

  // Ends everything in flight.
  void fail() noexcept;

  bool needs(uint32_t peer) const;
  // The operation in flight that comes first by the deadline or by the time to ask, or nullptr.
  std::shared_ptr<Operation> earliest(Clock::time_point Operation::* when) const;
  // Another rank says what it has called: fails the group if this rank has called something else.
  void compare(uint32_t peer, uint64_t seq, const Call& theirs);
  std::shared_ptr<Operation> find(uint64_t seq) const;
  // The ranks it still expects bytes from.
  std::vector<uint32_t> waits_for(const Operation& operation) const;
  // What this rank called by this number, if it has and that is not long ago.
  const Call* called(uint64_t seq) const;

  uint64_t last_posted() const { return next_seq_ - 1; }
  Call last_call() const { return history_.empty() ? Call{} : history_.back(); }
  void forget(const Connection& connection) { receiving_.erase(&connection); }

  // From now on transfers with many destinations go by packets. Before the first operation, on all ranks or on none.
  void spread_by(PacketMover& mover);
  // Nothing is in flight any more, and nothing will be.
  void stop_spreading() { spreads_.reset(); }
  void on_packets(const Multicast::Event& event);
  Spreads::Counters spread_counters() const { return spreads_ == nullptr ? Spreads::Counters{} : spreads_->counters(); }
  // Nothing can come from the peer any more.
  void lose(uint32_t peer);
  // There is a connection to the peer now: it hears what was called.
  void attached(Connection& connection);
  // The peer has called what has this number, and all before it.
  void called_by(uint32_t peer, uint64_t seq);
  bool was_called_by(uint32_t peer, uint64_t seq) const;

 private:
  // What a peer is owed, by collective.
  struct Outgoing {
    struct Queue {
      uint32_t left = 0;            // accesses not yet handed over completely
      std::vector<uint32_t> ready;  // accesses with bytes to hand over, the first is the next
    };
    std::map<uint64_t, Queue> queues;
    uint64_t posted = 0;  // the peer has called collectives up to this one
  };
  struct Early {
    uint32_t peer = 0;
    FrameHeader header;
    ScratchPool::Buffer payload;
  };

  void start(const std::shared_ptr<Operation>& operation);
  void say_called(Connection& connection, uint64_t seq);
  uint64_t limit(const Operation& operation, uint32_t access) const;
  void offer(const std::shared_ptr<Operation>& operation, uint32_t access);
  bool is_its_turn(const Operation& operation) const;
  static bool in_round(const Operation& operation, uint32_t step);
  void on_received(const std::shared_ptr<Operation>& operation, uint32_t access);
  void hand_over(Connection& connection, const std::shared_ptr<Operation>& operation, uint32_t access);
  bool expects(uint32_t peer, uint64_t seq) const;
  uint64_t kept_bytes(uint64_t seq, uint32_t peer, uint32_t transfer) const;
  bool gives_way(const Operation& operation, uint32_t access);
  void let_others_send(const Operation& operation);
  void advance(const std::shared_ptr<Operation>& operation, uint32_t access, uint64_t bytes);
  void apply(const std::shared_ptr<Operation>& operation, uint32_t access);
  void write(Operation& operation, uint32_t access, uint64_t offset, const uint8_t* bytes, uint64_t length);
  void replay(const std::shared_ptr<Operation>& operation);
  void take(const std::shared_ptr<Operation>& operation, uint32_t access, uint64_t offset, uint64_t length,
            ScratchPool::Buffer buffer);
  void borrow(const std::shared_ptr<Operation>& operation, uint32_t access, const FrameHeader& header,
              uint64_t address);
  void take_back(const std::shared_ptr<Operation>& operation, uint32_t peer, const FrameHeader& header);
  void schedule_pull(const std::shared_ptr<Operation>& operation, uint32_t access);
  int64_t pullable(Operation& operation, uint32_t access) const;
  void acknowledge(Connection& connection, const Operation& operation, uint32_t access, uint64_t bytes);
  // The access a frame is for, or -1 after failing the group because the frame makes no sense.
  int64_t check(uint32_t peer, const Operation& operation, const FrameHeader& header);
  void complete(const std::shared_ptr<Operation>& operation);
  void finalise(const std::shared_ptr<Operation>& operation);
  void conclude(const std::shared_ptr<Operation>& operation, const std::string& error);
  void resume(const Operation& operation);
  bool pull();
  bool by_packets(const Operation& operation, uint32_t access) const {
    return spreads_ != nullptr && Spreads::serves(*operation.program, operation.places, access);
  }
  bool spreads_any(const Operation& operation) const;
  void begin_spreads(const std::shared_ptr<Operation>& operation);
  void carry_out();
  // The call that the frame carries is the operation's own unless it is given.
  void tell(uint32_t peer, const SpreadNote& note, const Call* call = nullptr);
  void on_spread_frame(uint32_t peer, const FrameHeader& header, const uint8_t* bytes);
  void hand_over_repairs(Connection& connection);
  FrameHandler::Verdict take_spread_frame_of_ended(Connection& connection, const FrameHeader& header, uint8_t** to);
  // Another rank has called something else by this number: fails the group.
  void disagree(uint32_t peer, const Call& theirs, uint64_t seq);
  std::string mismatch(uint32_t peer, const Call& theirs, uint64_t seq) const;

  // Whether nothing is sent that the receiver has not called: then no stream stops, and what belongs to an operation
  // that was given up can be told from what comes early.
  bool asks_first() const { return lane_ == Lane::kTeams; }

  Group& group_;
  Owner& owner_;
  const Lane lane_;
  uint64_t next_seq_;
  std::map<uint64_t, std::shared_ptr<Operation>> operations_;
  std::deque<Call> history_;  // of the last collectives, to explain a frame that comes too late
  std::map<uint32_t, Outgoing> outgoing_;
  std::map<uint64_t, std::deque<Early>> early_;  // frames of collectives this rank has not called yet, or not read yet
  uint64_t early_bytes_ = 0;
  std::map<uint32_t, uint64_t> last_bytes_;          // of such frames, by peer, since it hung up
  std::vector<std::weak_ptr<Operation>> replays_;    // with such frames to go on with
  std::vector<std::weak_ptr<Operation>> epilogues_;  // with results to go on making final
  Clock::time_point give_way_until_ = Clock::time_point::max();
  std::vector<std::pair<std::weak_ptr<Operation>, uint32_t>> pulls_;  // a stack: what was let go on last is in cache

  // The frame being received on a connection, where its payload goes to scratch first.
  struct Receiving {
    bool begun = false;
    std::shared_ptr<Operation> operation;
    uint32_t access = 0;
    ScratchPool::Buffer buffer;
    bool early = false;
    uint64_t address = 0;
  };
  std::map<const Connection*, Receiving> receiving_;

  std::unique_ptr<Spreads> spreads_;
  bool carries_out_ = false;
  std::map<uint32_t, std::vector<OutFrame>> untold_;  // to peers whose connection is being opened
};

}  // namespace paceline
