// One rank's membership in one process group: its peers, the connections to them, and how it fails.
//
// Everything here runs under the engine's lock. A group fails as a whole: the first error is told to every peer, all
// operations end with it, and later calls repeat it.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "engine/collectives.h"
#include "engine/connection.h"
#include "engine/decisions.h"
#include "engine/mailbox.h"
#include "engine/operation.h"
#include "engine/packets.h"
#include "engine/teams.h"

namespace paceline {

class Engine;

struct PeerAddress {
  std::string host;  // for people
  std::string tcp;
  std::string shm;
};

struct Membership {
  GroupId id{};
  Secret secret{};
  uint64_t epoch = 0;
  uint32_t rank = 0;
  uint32_t size = 1;
  std::vector<PeerAddress> addresses;  // by rank; known a little later than the rest
};

// "2.5 s"
std::string in_seconds(std::chrono::milliseconds duration);

class Group final : public FrameHandler, public Owner, public std::enable_shared_from_this<Group> {
 public:
  Group(Engine& engine, Membership membership);
  ~Group();

  uint32_t rank() const { return membership_.rank; }
  uint32_t size() const { return membership_.size; }
  const Membership& membership() const { return membership_; }
  Engine& engine() { return engine_; }
  Collectives& collectives() { return collectives_; }
  Decisions& decisions() { return decisions_; }
  Mailbox& mailbox() { return mailbox_; }
  Teams& teams() { return teams_; }
  const std::string& failure() const override { return failure_; }
  bool left() const { return left_; }

  void introduce(std::vector<PeerAddress> addresses);
  // Packets reach all ranks: before the first operation, on all of them.
  void spread_by(std::unique_ptr<Multicast> multicast, PacketRates rates);
  // After the group was left: what has to be destroyed without the engine's lock, since threads end with it.
  std::unique_ptr<MulticastMover> take_mover();
  Multicast* multicast() { return mover_ == nullptr ? nullptr : &mover_->multicast(); }
  // Where one peer is, if peers come and go. One that was lost can be reached again.
  void introduce(uint32_t peer, PeerAddress address);

  // "rank 3 (hostname)"
  std::string who(uint32_t peer) const;

  // The connection to a peer, opened if there is none yet; nullptr while it is being opened or when the peer is gone.
  Connection* connection(uint32_t peer, Lane lane);
  // The same, if it is open.
  Connection* open_connection(uint32_t peer, Lane lane) const {
    return peers_[peer].lanes[index(lane)].connection.get();
  }
  // Ends the connection without a word.
  void cut(uint32_t peer, Lane lane) noexcept;
  // Why the peer's connections end: "closed its connection: ...".
  const std::string& ending(uint32_t peer) const { return peers_[peer].ending; }
  // Nothing more can come from the peer, nor be said to it, on this lane.
  bool gone(uint32_t peer, Lane lane) const {
    const LaneState& state = peers_[peer].lanes[index(lane)];
    return !peers_[peer].ending.empty() && state.connection == nullptr && state.opening != Opening::kAccepting;
  }
  void mark(Connection& connection);  // has frames to send: flushed at the end of the turn
  void flush_marked();

  void fail(int64_t culprit, std::string reason, uint64_t disputed = 0) noexcept override;
  // Does a piece of work for this group; what it throws fails the group.
  template <typename Work>
  void guarded(const Work& work) noexcept {
    try {
      work();
    } catch (const std::exception& thrown) {
      on_exception(thrown.what());
    } catch (...) {
      on_exception("an exception that is none of the standard library's");
    }
  }
  std::string failure_of(const std::string& title) override {
    heard_ = true;
    return title + ": " + failure_;
  }
  // Ranks disagree about this collective and perhaps those after it, also where this rank's part was done before it
  // heard so. Any thread.
  bool disputes(uint64_t seq) const { return seq >= disputed_; }
  // Whether they do, and no caller of this rank was told.
  bool unheard() const { return disputed_ != kUndisputed && !heard_; }
  // An orderly end: peers are told.
  void leave() noexcept;
  // Whether a collective is in flight, of all or of some.
  bool computes() const { return !collectives_.idle() || !teams_.idle(); }
  // Whether anything is in flight.
  bool busy() const;
  // One slice of what needs nothing from outside any more. False when there is none.
  bool work();
  bool has_work() const { return collectives_.has_work() || teams_.has_work(); }
  // Whether all connections have ended; and ends those that have not.
  bool closed() const;
  void close();

  // Deadlines. Returns when to be called again.
  Clock::time_point tick(Clock::time_point now);

  // Of the introductions (see introductions.h). kRefused: the peer is opening one itself.
  enum class Opening { kNone, kInitiated, kRefused, kAccepting, kOpen };
  Opening opening(uint32_t peer, Lane lane) const { return peers_[peer].lanes[index(lane)].opening; }
  void set_opening(uint32_t peer, Lane lane, Opening opening) { peers_[peer].lanes[index(lane)].opening = opening; }
  // Somebody proves with this nonce to be a member: false when it was used before, and is a listener's repetition.
  bool greet(const Nonce& nonce) { return greeted_.insert(nonce).second; }
  void attach(std::unique_ptr<Connection> connection);
  // A connection that somebody had begun to open came to nothing: open it ourselves if it is needed.
  void reopen(uint32_t peer, Lane lane);
  // A connection to the peer could not be opened. Why that is may be about to be heard from others.
  void suspect(uint32_t peer, Lane lane, const std::string& reason);
  // The peer cannot be reached any more; an empty reason repeats the one known. Fails the group if it is needed.
  void lose(uint32_t peer, const std::string& reason);

  // Of the connections.
  Verdict on_header(Connection& connection, const FrameHeader& header, uint8_t** to) override;
  void on_frame(Connection& connection, const FrameHeader& header, const uint8_t* bytes) override;
  void on_sent(Connection& connection, const OutFrame& frame) override;
  void on_room(Connection& connection) override;
  void on_flushed() override { flush_marked(); }
  void on_broken(Connection& connection, const std::string& reason) override;
  void on_exception(const char* what) noexcept override;

 private:
  struct LaneState {
    Opening opening = Opening::kNone;
    std::unique_ptr<Connection> connection;
  };
  struct Peer {
    std::array<LaneState, kLanes.size()> lanes;
    std::string ending;  // why its connections end, once one of them has
    bool said_bye = false;
  };
  // A question to all ranks about an operation that takes too long.
  struct Inquiry {
    uint64_t seq = 0;
    Clock::time_point until;
    std::vector<int64_t> answers;  // highest collective called, or -1 for no answer
    std::vector<Call> calls;
  };

  // A peer that did not let us in: perhaps because of another's death, of which word is on its way.
  struct Suspicion {
    uint32_t peer = 0;
    Lane lane = Lane::kCollective;
    std::string reason;
    Clock::time_point until;
    bool ripe = false;
  };

  static size_t index(Lane lane) { return static_cast<size_t>(lane); }
  bool needs(uint32_t peer, Lane lane) const;
  Clock::time_point judge(Clock::time_point now);
  void look_for_life(Clock::time_point now);
  void probe(uint32_t peer, const Operation& operation);
  void ask_around(Operation& operation, Clock::time_point now);
  void inquire(const Operation& operation, Clock::time_point now);
  void conclude();
  OutFrame failure_frame() const;
  void tell_failure(Connection& connection);
  template <typename Words>
  void say_last(const Words& words) noexcept;
  void end_everything() noexcept;

  Engine& engine_;
  Membership membership_;
  std::vector<Peer> peers_;
  std::unique_ptr<MulticastMover> mover_;
  std::unique_ptr<PacketWatcher> packet_watcher_;
  Collectives collectives_;
  Decisions decisions_;
  Mailbox mailbox_;
  Teams teams_;
  std::set<Nonce> greeted_;
  std::vector<Connection*> marked_;
  std::map<const Connection*, std::vector<uint8_t>> error_texts_;
  std::vector<Suspicion> suspicions_;
  std::unique_ptr<Inquiry> inquiry_;
  std::string failure_;
  int64_t culprit_ = -1;
  static constexpr uint64_t kUndisputed = UINT64_MAX;
  std::atomic<uint64_t> disputed_{kUndisputed};
  bool heard_ = false;
  bool left_ = false;
};

}  // namespace paceline
