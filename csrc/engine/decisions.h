// How a collective runs that awaits a decision: one decision, numbered, the same on every rank.
//
// Rank 0 of a group is its coordinator. Operations that await a decision are numbered by *turns*, in the order of the
// calls. A rank that calls one tells the coordinator (`arrived`), whose progress thread sees it also while its own
// training thread is late. Decisions are made turn by turn, without a gap, and told to all (`decided`):
//
//   what is known of the next turn                        decision
//   a forecast                                            the forecast, for a window of turns ahead: nobody waits
//   all ranks have arrived                                the empty choice
//   few are missing, nobody came for a while (patience)   the missing ranks, "3" or "2,5"
//   the missing ranks were announced before, and have     the missing ranks, at once
//   not been seen since
//
// A decision is never taken back, so ranks cannot disagree. What a choice means is the business of `prepare`. The
// engine knows no algorithm.
//
//   an operation   event                          becomes
//   awaiting       its turn is decided            preparing (at once where the program is in the book)
//   preparing      its program is made            running: collectives.cc
//   either         the group fails                ended
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/connection.h"
#include "engine/operation.h"

namespace paceline {

class Group;

class Decisions {
 public:
  // When each rank called the collective of a turn, on the coordinator's clock.
  struct Record {
    uint64_t turn = 0;
    uint64_t seq = 0;
    Call call;
    uint32_t first = 0;                       // the rank that called it first
    std::vector<Clock::time_point> arrivals;  // by rank
    uint32_t missing = 0;                     // ranks that have not come yet
    Clock::time_point last;                   // arrival
    std::string choice;
    uint64_t bytes() const;
  };

  struct Rules {
    bool enabled = false;
    double patience_s_per_byte = 0;
    std::chrono::duration<double> least_patience{0};
    uint32_t most_missing = 0;  // more ranks than this are waited for
    uint64_t window = 8;        // turns that a forecast is granted for
    // Runs what takes long or needs Python, off the lock.
    std::function<void(std::function<void()>)> elsewhere;
    // From what was seen since the last question to the choice for turns to come; empty: no forecast.
    std::function<std::string(const std::vector<Record>&)> forecast;
  };

  explicit Decisions(Group& group) : group_(group) {}

  void decide_by(Rules rules);

  // This rank has called something: if others called something else by that number, the group fails.
  void called(const Operation& operation);
  // An operation awaits its turn. Returns the choice if it is made and the program is not: the caller prepares.
  std::optional<std::string> await(const std::shared_ptr<Operation>& operation);
  std::vector<uint32_t> waits_for(const Operation& operation) const;
  // The coordinator needs every rank while there is something to decide, also before it has called it itself.
  bool needs_all() const { return coordinates() && first_pending_ + pending_.size() > decided_ + 1; }

  void on_header(Connection& connection, const FrameHeader& header, uint8_t** to);
  void on_frame(Connection& connection, const FrameHeader& header);
  void attached(uint32_t peer);
  void forget(const Connection& connection) { texts_.erase(&connection); }
  void fail() noexcept;
  Clock::time_point tick(Clock::time_point now);

  // What to ask for a forecast, and about what; nothing when there is nothing new.
  std::function<std::string(const std::vector<Record>&)> next_question(std::vector<Record>* fresh);
  void foresee(const std::string& choice);
  // Of the last turns that all ranks have come to.
  std::vector<Record> records() const { return {records_.begin(), records_.end()}; }

 private:
  struct Decision {
    uint64_t first = 0, last = 0;
    std::string choice;
  };

  bool coordinates() const;
  void refuse(uint32_t peer);  // its settings are not this rank's
  void arrive(uint32_t rank, uint64_t turn, uint64_t seq, const Call& call);
  void settle(Clock::time_point now);
  void decide(uint64_t first, uint64_t last, const std::string& choice);
  void learn(const Decision& decision);
  void follow();
  const std::string* choice_of(uint64_t turn) const;
  void launch(const std::shared_ptr<Operation>& operation, const std::string& choice);
  std::vector<uint32_t> missing_at(const Record& record) const;
  std::chrono::duration<double> patience(const Record& record) const;
  void tell(uint32_t peer);
  void prune();

  Group& group_;
  std::optional<Rules> rules_;
  uint64_t turns_ = 0;    // operations of this rank that awaited a decision so far
  uint64_t decided_ = 0;  // turns up to this one are decided
  std::deque<Decision> book_;
  std::map<uint64_t, std::shared_ptr<Operation>> awaiting_;  // by turn
  std::map<const Connection*, std::vector<uint8_t>> texts_;  // of decisions being received
  std::deque<FrameHeader> unsaid_;                           // arrivals, until there is a connection

  // Of the coordinator.
  uint64_t first_pending_ = 1;     // the first turn that not all ranks have come to
  std::deque<Record> pending_;     // from that turn on
  std::vector<uint64_t> arrived_;  // by rank: the last turn it has come to
  std::vector<uint64_t> told_;     // by rank: the last turn it knows the decision of
  std::vector<bool> absent_;       // announced as missing, and not seen since
  Clock::time_point settle_at_ = Clock::time_point::max();
  std::string forecast_;
  bool asking_ = false;
  std::deque<Record> records_, fresh_;
};

}  // namespace paceline
