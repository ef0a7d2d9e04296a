// The operations of teams: some of a group's ranks do something together, without a group of their own.
//
// A team lives as long as its one operation, whose callers give it a number that all members know. It has connections
// apart from the group's collectives, and nothing is sent that the receiver has not called: so the operations of
// different teams may come in any order, and one that was given up leaves nothing behind that could be taken for a
// part of another. What goes wrong ends the operation on all its members, and nothing else:
//
//   state       event                                            becomes
//   (unknown)   post                                             running, and the members hear so
//   (unknown)   a peer has called it, or has given it up         (unknown), and that is remembered for the call
//   running     the last byte has come and gone                  done
//   running     a member is lost, disagrees or gives up;         given up: all members hear why
//               the time is over; the caller gives up
//   done, given up: the number cannot be used again
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/collectives.h"

namespace paceline {

// Why an operation of a team was given up.
struct GivenUp {
  uint64_t number = 0;
  int64_t culprit = -1;  // the rank to blame, or -1
  std::string reason;
};

class Team final : public Owner {
 public:
  Team(Group& group, std::shared_ptr<Operation> operation);

  const std::string& failure() const override { return failure_; }
  void fail(int64_t culprit, std::string reason, uint64_t disputed = 0) noexcept override;
  std::string failure_of(const std::string& title) override { return title + ": " + failure_; }

  uint64_t number() const { return operation_->number; }
  Collectives& collectives() { return collectives_; }
  const Collectives& collectives() const { return collectives_; }
  // Why it ends when its time is over, or nothing while others may know better.
  std::optional<std::string> overdue(Clock::time_point now, int64_t* culprit);

 private:
  Group& group_;
  std::shared_ptr<Operation> operation_;
  std::string failure_;
  bool waits_for_others_ = false;
  Collectives collectives_;
};

class Teams {
 public:
  explicit Teams(Group& group) : group_(group) {}

  void post(const std::shared_ptr<Operation>& operation);
  // Ends the operation of this number with a reason, now or when it is called.
  void give_up(uint64_t number, const std::string& reason);
  // Tells the peer that an operation was given up, when there is a connection.
  void tell(uint32_t peer, const GivenUp& given_up);

  void on_header(Connection& connection, const FrameHeader& header, uint8_t** to);
  void on_frame(Connection& connection, const FrameHeader& header, const uint8_t* bytes);
  void on_sent(Connection& connection, const OutFrame& frame);
  void on_room(Connection& connection);
  void attached(Connection& connection);
  void forget(const Connection& connection);
  // Nothing more can come from the peer.
  void lose(uint32_t peer);
  // Ends everything in flight, where the group has failed.
  void fail() noexcept;

  bool idle() const { return teams_.empty(); }
  bool needs(uint32_t peer) const;
  bool work();
  bool has_work() const;
  // Deadlines. Returns when to be called again.
  Clock::time_point tick(Clock::time_point now);

 private:
  // What was said of an operation that this rank has not called.
  struct Word {
    std::set<uint32_t> callers;
    std::optional<GivenUp> given_up;
  };

  std::shared_ptr<Team> find(uint64_t number) const;
  // Does something with a team, and lets go of it if that was its end.
  template <typename Work>
  void with(const std::shared_ptr<Team>& team, const Work& work);
  template <typename Work>
  void with_all(const Work& work);
  Word* remember(uint64_t number);
  bool has_ended(uint64_t number) const;

  Group& group_;
  std::map<uint64_t, std::shared_ptr<Team>> teams_;
  std::map<uint64_t, Word> words_;                   // by number
  std::deque<uint64_t> ended_;                       // the numbers of those that ended last
  std::deque<std::pair<uint32_t, GivenUp>> untold_;  // for peers without a connection as yet
  std::map<const Connection*, std::vector<uint8_t>> texts_;
  std::vector<uint8_t> trash_;
};

}  // namespace paceline
