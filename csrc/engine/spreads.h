// Transfers that go to many ranks at once (spreads): what their source and receivers tell each other, so that every
// receiver ends with all bytes although packets get lost. Bytes travel by multicast (PacketMover); all else is frames
// on the streams between ranks (transport/frame.h). No network, lock or clock is here: whoever owns it carries out its
// effects, and tells it what has come.
//
//   a source is   and becomes   when                                              and then
//   gathering     sending       its bytes are complete, all receivers are armed,  the packets go out
//                               and it is its turn
//   sending       listening     all packets are sent                              tells `cast`
//   listening     sending       all receivers without the bytes have answered,    what any of them lacks goes out again
//                               and some lack bytes
//   any           over          all receivers have the bytes                      its reads are done
//
//   a receiver is  and becomes  when                                              and then
//   closed         armed        its write may happen, for all bytes               packets are placed; tells `armed`
//   armed          armed        it is quiet after `cast`, and much is missing     tells `lacks` and the gaps
//   armed          repairing    it is quiet after `cast`, and little is missing,  tells `lacks` without gaps; asks for
//                               or it did not help to send it again               them by `want`
//   repairing      repairing    whom it asked has ended, is lost or says nothing  asks the source
//   both           over         all bytes are there                               tells `have`; its write is done
//
// Whose turn it is: the spreads of a step follow those of the step before one by one, so as many ranks send at once as
// the schedule lets. A later operation's wait for all of an earlier one. A rank knows that a spread is sent when its
// source says `cast`, or when it has all of it.
//
// A receiver asks the one before it (in the order of ranks, beginning behind the source), which answers when it has all
// bytes itself; so one that everybody must repair from does not send to all, and asking ends at the source. A
// receiver's operation ends when it has its bytes and has answered what it was asked by then, not when all have theirs:
// who asks later hears `over`, and asks the source, whose operation ends last.
//
// A peer may ask each rank for the bytes of a transfer once, and for as many rounds as there are, so one that lies
// costs a bounded amount of work.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/operation.h"
#include "engine/program.h"
#include "transport/frame.h"
#include "transport/multicast/multicast.h"

namespace paceline {

// What moves the packets: Multicast, or a network made up by a test. Its calls return at once.
class PacketMover {
 public:
  virtual ~PacketMover() = default;
  virtual void arm(uint64_t transfer, uint32_t source, uint8_t* to, uint64_t bytes) = 0;
  virtual void disarm(uint64_t transfer) noexcept = 0;
  virtual bool place(uint64_t transfer, uint64_t offset, const uint8_t* bytes, uint64_t length) = 0;
  virtual std::vector<Range> missing(uint64_t transfer, size_t most) const = 0;
  // Together with so many other ranks, less one.
  virtual void send(uint64_t transfer, const uint8_t* from, uint64_t bytes, uint32_t width) = 0;
  virtual void send_again(uint64_t transfer, const uint8_t* from, uint64_t bytes, std::span<const Range> ranges) = 0;
  virtual void cancel(uint64_t transfer) noexcept = 0;
};

// A frame about a spread, without what all frames of an operation have.
struct SpreadNote {
  FrameType type = FrameType::kArmed;
  uint64_t seq = 0;
  uint32_t number = 0;
  uint64_t round = 0;
  uint64_t total = 0;
  std::vector<Range> ranges;
};

class Spreads {
 public:
  // Below this, a packet to each is as cheap as what is told about one to all.
  static constexpr uint64_t kLeastBytes = 4096;
  // How often a source sends to all, at most.
  static constexpr uint64_t kMostRounds = 8;

  // Something for the owner to do, in this order.
  struct Effect {
    enum class Kind : uint8_t {
      kTell,      // the note to the peer
      kDone,      // the access of the operation has all its bytes where they belong
      kRepairs,   // next_repair has something for the peer
      kReleased,  // the operation owes nobody bytes any more
      kLied,      // the peer said what makes no sense: `text`
    };
    Kind kind = Kind::kTell;
    uint64_t seq = 0;
    uint32_t peer = 0;
    uint32_t access = 0;
    SpreadNote note;
    std::string text;
  };

  // Bytes that a peer wanted.
  struct Repair {
    uint64_t seq = 0;
    uint32_t number = 0;
    uint64_t offset = 0;
    uint64_t length = 0;
    uint64_t total = 0;
    const uint8_t* from = nullptr;
  };

  Spreads(uint32_t rank, PacketMover& mover) : rank_(rank), mover_(mover) {}

  // Whether this access of an operation is a spread's.
  static bool serves(const Program& program, const std::vector<Place>& places, uint32_t access) {
    const Access& found = program.accesses()[access];
    return found.spread >= 0 && places[found.chunk].bytes >= kLeastBytes;
  }

  // An operation begins; `program` and `places` stay where they are until its end.
  void begin(uint64_t seq, const Program& program, const std::vector<Place>& places);
  // Nothing of it is touched any more. Numbers that are not known are ignored.
  void end(uint64_t seq) noexcept;
  // The access may go on: a read has all its bytes, a write may be written.
  void ready(uint64_t seq, uint32_t access);

  // What a peer says of an operation that has begun and not ended.
  void on_note(uint32_t peer, const SpreadNote& note);
  void on_repair(uint32_t peer, const Repair& repair);
  void on_event(const Multicast::Event& event);
  // Nothing can come from the peer any more, nor be said to it.
  void lose(uint32_t peer);

  // Bytes for a peer, at most so many; nothing when there are none.
  std::optional<Repair> next_repair(uint32_t peer, uint64_t most);
  bool has_repairs(uint32_t peer) const { return repairs_.count(peer) > 0; }
  // So many of them are with the kernel.
  void on_repaired(uint32_t peer, uint64_t seq, uint64_t bytes);
  // Whether peers are still to get bytes that they wanted of this operation.
  bool owes(uint64_t seq) const { return owed_.count(seq) > 0; }

  std::vector<Effect> take_effects() { return std::exchange(effects_, {}); }

  // For people: how often bytes were sent to all again, and how many came by repair.
  struct Counters {
    uint64_t rounds = 0;
    uint64_t repaired_bytes = 0;
  };
  const Counters& counters() const { return counters_; }

 private:
  enum class State : uint8_t { kGathering, kSending, kListening, kClosed, kArmed, kRepairing, kOver };
  struct Receiver {
    bool armed = false;
    bool has = false;
    bool alone = false;  // gets the rest by `want`
    uint64_t answered = 0;
  };
  struct Running {
    const Spread* spread = nullptr;
    uint64_t transfer = 0;
    uint64_t bytes = 0;
    State state = State::kOver;
    bool sent = true;  // as far as this rank knows
    uint64_t round = 0;
    std::map<uint32_t, uint64_t> wanted;  // bytes each peer has asked for

    // On the source.
    const uint8_t* from = nullptr;
    bool complete = false;
    std::vector<Receiver> receivers;
    std::vector<Range> lacking;

    // On a receiver.
    uint8_t* to = nullptr;
    uint64_t answered = 0;
    uint64_t lacked = 0;
    bool asks_source = false;
    uint32_t asked = 0;
    uint64_t asked_left = 0;
    uint32_t silent = 0;
    std::map<uint32_t, std::vector<Range>> asked_by;  // answered when all bytes are here
  };
  struct Job {
    const Program* program = nullptr;
    std::vector<Running> spreads;  // as the program has them
    uint32_t unsent = 0;
  };
  // Of one peer's wishes.
  struct Wish {
    uint64_t seq = 0;
    const Running* running = nullptr;
    std::deque<Range> ranges;
  };

  bool sends(const Running& running) const { return running.spread->source == rank_; }
  Running* find(uint64_t transfer, Job** job);
  void go_on();
  void mark_sent(Job& job, Running& running);
  void finish(Job& job, Running& running);
  void answer(Running& running);
  void ask(Running& running);
  void on_quiet(Running& running);
  void on_cast(uint32_t peer, Job& job, Running& running, const SpreadNote& note);
  void on_note_to_source(uint32_t peer, Job& job, Running& running, const SpreadNote& note);
  void on_have(Job& job, Running& running, size_t receiver);
  void on_want(uint32_t peer, Running& running, const SpreadNote& note);
  void next_round(Running& running);
  void grant(uint32_t peer, const Running& running, const std::vector<Range>& ranges);
  void drop_repairs(uint32_t peer, const Running& running);
  void tell(uint32_t peer, const Running& running, FrameType type, std::vector<Range> ranges = {});
  void lied(uint32_t peer, const std::string& text);

  uint32_t rank_;
  PacketMover& mover_;
  std::map<uint64_t, Job> jobs_;
  std::map<uint32_t, std::deque<Wish>> repairs_;  // by peer
  std::map<uint64_t, std::map<uint32_t, uint64_t>>
      owed_;  // bytes wanted and not with the kernel, by operation and peer
  std::vector<Effect> effects_;
  Counters counters_;
  bool warned_ = false;  // that nothing comes by multicast
};

}  // namespace paceline
