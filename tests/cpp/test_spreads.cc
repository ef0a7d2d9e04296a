// The protocol of transfers to many ranks, on a network that is made up: packets are lost and come in any order, frames
// come late, ranks call late and leave early. A seed says what happens.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>

#include "engine/spreads.h"
#include "ranks.h"

namespace paceline::testing {
namespace {

constexpr uint64_t kChunk = 1000;

struct Packet {
  uint32_t to = 0;
  uint32_t source = 0;
  uint64_t transfer = 0;
  uint64_t offset = 0;
  std::vector<uint8_t> bytes;
};

// Which packets are lost.
using Loses = std::function<bool(const Packet& packet, std::mt19937& random)>;

struct Settings {
  uint32_t num_ranks = 4;
  uint64_t bytes = 40'000;  // of each operation's buffer
  uint32_t num_operations = 1;
  Loses loses = [](const Packet&, std::mt19937&) { return false; };
  bool leaves_early = false;  // a rank leaves as soon as its own operations have ended
  bool hasty = true;          // ranks find it quiet while packets are on their way
};

class Simulation {
 public:
  Simulation(const Schedule& schedule, Kind kind, const Settings& settings, uint32_t seed)
      : settings_(settings), random_(seed) {
    for (uint64_t seq = 1; seq <= settings.num_operations; ++seq) {
      jobs_.emplace_back(schedule, kind, settings.num_ranks, settings.bytes / 4, seed + seq);
    }
    for (uint32_t rank = 0; rank < settings.num_ranks; ++rank) ranks_.push_back(std::make_unique<Rank>(*this, rank));
  }

  // False when nothing goes on any more although operations are in flight.
  bool run() {
    for (int quiet = 0; !all_ended();) {
      if (step()) {
        quiet = 0;
      } else if (++quiet > 1000) {
        return false;
      }
    }
    return true;
  }

  bool right() const {
    return std::all_of(jobs_.begin(), jobs_.end(), [](const Job& job) { return job.right(); });
  }
  const std::string& lie() const { return lie_; }
  uint64_t packets() const { return num_packets_; }
  uint64_t repaired() const {
    uint64_t bytes = 0;
    for (const auto& rank : ranks_) bytes += rank->spreads.counters().repaired_bytes;
    return bytes;
  }
  uint64_t rounds() const {
    uint64_t rounds = 0;
    for (const auto& rank : ranks_) rounds += rank->spreads.counters().rounds;
    return rounds;
  }
  size_t most_at_once() const { return most_at_once_; }
  bool overtook() const { return overtook_; }

 private:
  struct Frame {
    bool repairs = false;
    SpreadNote note;
    Spreads::Repair repair;
    std::vector<uint8_t> bytes;
  };

  struct Rank final : PacketMover {
    struct Armed {
      uint32_t source = 0;
      uint8_t* to = nullptr;
      std::vector<bool> there;
      uint64_t left = 0;
    };
    struct InFlight {
      std::shared_ptr<Operation> operation;
      size_t left = 0;
    };

    Rank(Simulation& simulation, uint32_t number) : simulation(simulation), number(number), spreads(number, *this) {}

    void arm(uint64_t transfer, uint32_t source, uint8_t* to, uint64_t bytes) override {
      EXPECT_EQ(armed.count(transfer), 0u);
      armed[transfer] = {source, to, std::vector<bool>(bytes), bytes};
    }
    void disarm(uint64_t transfer) noexcept override { armed.erase(transfer); }
    bool place(uint64_t transfer, uint64_t offset, const uint8_t* bytes, uint64_t length) override {
      const auto found = armed.find(transfer);
      if (found == armed.end() || offset + length > found->second.there.size()) return false;
      for (uint64_t i = 0; i < length; ++i) {
        if (found->second.there[offset + i]) continue;
        found->second.there[offset + i] = true;
        found->second.to[offset + i] = bytes[i];
        --found->second.left;
      }
      return found->second.left == 0;
    }
    std::vector<Range> missing(uint64_t transfer, size_t most) const override {
      std::vector<Range> gaps;
      const std::vector<bool>& there = armed.at(transfer).there;
      for (uint64_t offset = 0; offset < there.size(); offset += kChunk) {
        const uint64_t bytes = std::min<uint64_t>(kChunk, there.size() - offset);
        const auto begin = there.begin() + static_cast<std::ptrdiff_t>(offset);
        if (std::all_of(begin, begin + static_cast<std::ptrdiff_t>(bytes), [](bool is) { return is; })) continue;
        if (!gaps.empty() && gaps.back().offset + gaps.back().bytes == offset) {
          gaps.back().bytes += bytes;
        } else if (gaps.size() < most) {
          gaps.push_back({offset, bytes});
        }
      }
      return gaps;
    }
    void send(uint64_t transfer, const uint8_t* from, uint64_t bytes, uint32_t) override {
      simulation.begins_to_send(transfer);
      const Range all{0, bytes};
      send_again(transfer, from, bytes, std::span(&all, 1));
    }
    void send_again(uint64_t transfer, const uint8_t* from, uint64_t, std::span<const Range> ranges) override {
      for (const Range& range : ranges) {
        for (uint64_t done = 0; done < range.bytes; done += kChunk) {
          const uint64_t length = std::min(kChunk, range.bytes - done);
          simulation.multicast({0,
                                number,
                                transfer,
                                range.offset + done,
                                {from + range.offset + done, from + range.offset + done + length}});
        }
      }
      events.push_back({Multicast::Event::Kind::kSent, transfer});
    }
    void cancel(uint64_t) noexcept override {}

    Simulation& simulation;
    uint32_t number;
    Spreads spreads;
    std::map<uint64_t, Armed> armed;
    std::deque<Multicast::Event> events;
    std::map<uint64_t, InFlight> operations;
    std::vector<std::pair<uint32_t, Frame>> early;
    uint64_t posted = 0;
    bool left = false;
    std::set<uint32_t> lost;
  };

  bool all_ended() const {
    return !lie_.empty() || std::all_of(ranks_.begin(), ranks_.end(), [this](const auto& rank) {
      return rank->posted == settings_.num_operations && rank->operations.empty();
    });
  }

  size_t dice(size_t sides) { return std::uniform_int_distribution<size_t>(0, sides - 1)(random_); }

  // One thing that may happen next happens. False when all that is left is to wait until ranks find it quiet.
  bool step() {
    std::vector<std::function<void()>> choices;
    for (const auto& rank : ranks_) {
      if (rank->posted < settings_.num_operations) choices.push_back([this, &rank] { post(*rank); });
      if (!rank->events.empty()) choices.push_back([this, &rank] { take_event(*rank); });
    }
    for (auto& [link, frames] : streams_) {
      if (!frames.empty()) choices.push_back([this, &link = link] { deliver(link.first, link.second); });
    }
    for (size_t i = 0; !packets_.empty() && i < ranks_.size(); ++i) choices.push_back([this] { deliver_packet(); });
    const bool nothing = choices.empty();
    if (nothing || (settings_.hasty && dice(100) == 0)) {
      for (const auto& rank : ranks_) {
        for (const auto& entry : rank->armed) rank->events.push_back({Multicast::Event::Kind::kQuiet, entry.first});
      }
    }
    if (!nothing) choices[dice(choices.size())]();
    if (nothing) {  // who was told that it is quiet does something, or not yet
      bool did = false;
      for (const auto& rank : ranks_) {
        while (!rank->events.empty()) take_event(*rank);
      }
      for (const auto& [link, frames] : streams_) did = did || !frames.empty();
      return did || !packets_.empty();
    }
    return true;
  }

  void post(Rank& rank) {
    const uint64_t seq = ++rank.posted;
    const auto operation = jobs_[seq - 1].operation(rank.number);
    const Program& program = *operation->program;
    rank.operations[seq] = {operation, program.accesses().size()};
    rank.spreads.begin(seq, program, operation->places);
    for (uint32_t i = 0; i < program.accesses().size(); ++i) rank.spreads.ready(seq, i);
    carry_out(rank);
    std::vector<std::pair<uint32_t, Frame>> early;
    std::swap(early, rank.early);
    for (auto& [from, frame] : early) take(rank, from, std::move(frame));
  }

  void take_event(Rank& rank) {
    const Multicast::Event event = rank.events.front();
    rank.events.pop_front();
    if (event.kind == Multicast::Event::Kind::kSent) sending_.erase(event.transfer);
    rank.spreads.on_event(event);
    carry_out(rank);
  }

  void begins_to_send(uint64_t transfer) {
    const uint64_t seq = transfer >> 24;
    sending_.insert(transfer);
    most_at_once_ = std::max(most_at_once_, sending_.size());
    overtook_ = overtook_ || *sending_.begin() >> 24 < seq;
  }

  void multicast(Packet packet) {
    ++num_packets_;
    for (uint32_t to = 0; to < ranks_.size(); ++to) {
      packet.to = to;
      if (to != packet.source && !settings_.loses(packet, random_)) packets_.push_back(packet);
    }
  }

  void deliver_packet() {
    std::swap(packets_[dice(packets_.size())], packets_.back());
    const Packet packet = std::move(packets_.back());
    packets_.pop_back();
    Rank& rank = *ranks_[packet.to];
    const auto found = rank.armed.find(packet.transfer);
    if (found == rank.armed.end() || found->second.left == 0) return;
    EXPECT_EQ(found->second.source, packet.source);
    const bool complete = rank.place(packet.transfer, packet.offset, packet.bytes.data(), packet.bytes.size());
    if (!complete) return;
    rank.events.push_back({Multicast::Event::Kind::kComplete, packet.transfer});
    sending_.erase(packet.transfer);  // this rank knows before the source tells
  }

  void carry_out(Rank& rank) {
    for (auto effects = rank.spreads.take_effects(); !effects.empty(); effects = rank.spreads.take_effects()) {
      for (const Spreads::Effect& effect : effects) {
        switch (effect.kind) {
          case Spreads::Effect::Kind::kTell:
            tell(rank.number, effect.peer, effect.note);
            break;
          case Spreads::Effect::Kind::kDone:
            --rank.operations.at(effect.seq).left;
            conclude(rank, effect.seq);
            break;
          case Spreads::Effect::Kind::kRepairs:
            send_repairs(rank, effect.peer);
            break;
          case Spreads::Effect::Kind::kReleased:
            conclude(rank, effect.seq);
            break;
          case Spreads::Effect::Kind::kLied:
            lie_ = "rank " + std::to_string(effect.peer) + " " + effect.text;
            break;
        }
      }
    }
  }

  // A frame overtakes bytes, but no other frame.
  void tell(uint32_t from, uint32_t to, const SpreadNote& note) {
    if (ranks_[from]->lost.count(to) > 0) return;
    std::deque<Frame>& frames = streams_[{from, to}];
    const auto first = std::find_if(frames.begin(), frames.end(), [](const Frame& frame) { return frame.repairs; });
    frames.insert(first, {false, note, {}, {}});
  }

  void send_repairs(Rank& rank, uint32_t to) {
    while (const auto repair = rank.spreads.next_repair(to, 1 + dice(3000))) {
      Frame frame{true, {}, *repair, {repair->from, repair->from + repair->length}};
      if (rank.lost.count(to) == 0) streams_[{rank.number, to}].push_back(std::move(frame));
      rank.spreads.on_repaired(to, repair->seq, repair->length);
    }
  }

  void deliver(uint32_t from, uint32_t to) {
    std::deque<Frame>& frames = streams_[{from, to}];
    Frame frame = std::move(frames.front());
    frames.pop_front();
    if (!ranks_[to]->left) take(*ranks_[to], from, std::move(frame));
    if (ranks_[from]->left && frames.empty()) lose(*ranks_[to], from);
  }

  void take(Rank& rank, uint32_t from, Frame frame) {
    const uint64_t seq = frame.repairs ? frame.repair.seq : frame.note.seq;
    if (seq > rank.posted) {
      rank.early.emplace_back(from, std::move(frame));
      return;
    }
    if (rank.operations.count(seq) == 0) {
      SpreadNote over = frame.note;
      over.type = FrameType::kOver;
      over.ranges.clear();
      if (!frame.repairs && frame.note.type == FrameType::kWant) tell(rank.number, from, over);
      return;
    }
    if (frame.repairs) {
      frame.repair.from = frame.bytes.data();
      rank.spreads.on_repair(from, frame.repair);
    } else {
      rank.spreads.on_note(from, frame.note);
    }
    carry_out(rank);
  }

  void conclude(Rank& rank, uint64_t seq) {
    const auto found = rank.operations.find(seq);
    if (found == rank.operations.end() || found->second.left > 0 || rank.spreads.owes(seq)) return;
    rank.spreads.end(seq);
    rank.operations.erase(found);
    const bool last = rank.posted == settings_.num_operations && rank.operations.empty();
    if (!last || !settings_.leaves_early) return;
    rank.left = true;
    for (const auto& other : ranks_) {
      if (other->number != rank.number && streams_[{rank.number, other->number}].empty()) lose(*other, rank.number);
    }
  }

  void lose(Rank& rank, uint32_t peer) {
    if (rank.left || !rank.lost.insert(peer).second) return;
    rank.spreads.lose(peer);
    carry_out(rank);
  }

  Settings settings_;
  std::mt19937 random_;
  std::deque<Job> jobs_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::map<std::pair<uint32_t, uint32_t>, std::deque<Frame>> streams_;
  std::vector<Packet> packets_;
  std::set<uint64_t> sending_;
  size_t most_at_once_ = 0;
  bool overtook_ = false;
  uint64_t num_packets_ = 0;
  std::string lie_;
};

Loses share(double share) {
  return
      [share](const Packet&, std::mt19937& random) { return std::uniform_real_distribution<>(0, 1)(random) < share; };
}

void expect_right(const Schedule& schedule, Kind kind, const Settings& settings, uint32_t seed, uint32_t chains) {
  Simulation simulation(schedule, kind, settings, seed);
  const std::string what = schedule.name + ", seed " + std::to_string(seed);
  ASSERT_TRUE(simulation.run()) << what << ": it does not end";
  ASSERT_EQ(simulation.lie(), "") << what;
  EXPECT_TRUE(simulation.right()) << what;
  EXPECT_LE(simulation.most_at_once(), chains) << what;
  EXPECT_FALSE(simulation.overtook()) << what;
}

void expect_all_right(const Settings& settings, uint32_t seeds) {
  for (uint32_t seed = 0; seed < seeds; ++seed) {
    for (uint32_t chains = 1; chains <= 3; ++chains) {
      expect_right(multicast_all_gather(settings.num_ranks, chains), Kind::kAllGather, settings, seed, chains);
    }
    expect_right(multicast_broadcast(2), Kind::kBroadcast, settings, seed, 1);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST(Spreads, NothingLost) {
  for (const uint32_t num_ranks : {2u, 3u, 5u}) {
    for (const uint64_t bytes : {24'000u, 40'004u}) {
      Settings settings;
      settings.num_ranks = num_ranks;
      settings.bytes = bytes;
      expect_all_right(settings, 10);
    }
  }
}

TEST(Spreads, EachPacketIsSentOnceWhereNothingIsLost) {
  Settings settings;
  settings.hasty = false;
  Simulation simulation(multicast_all_gather(4, 1), Kind::kAllGather, settings, 1);
  ASSERT_TRUE(simulation.run());
  EXPECT_EQ(simulation.packets(), 40u);
  EXPECT_EQ(simulation.repaired(), 0u);
}

TEST(Spreads, LossesByChance) {
  for (const double loss : {0.01, 0.1, 0.3, 0.9, 1.0}) {
    for (const bool leaves_early : {false, true}) {
      Settings settings;
      settings.loses = share(loss);
      settings.leaves_early = leaves_early;
      expect_all_right(settings, 25);
    }
  }
}

TEST(Spreads, ManyOperations) {
  for (const bool leaves_early : {false, true}) {
    Settings settings;
    settings.num_ranks = 3;
    settings.num_operations = 4;
    settings.loses = share(0.15);
    settings.leaves_early = leaves_early;
    expect_all_right(settings, 25);
  }
}

TEST(Spreads, LossesOfOneKind) {
  const std::vector<std::pair<const char*, Loses>> kinds = {
      {"the first", [](const Packet& packet, std::mt19937&) { return packet.offset == 0; }},
      {"the last", [](const Packet& packet, std::mt19937&) { return packet.bytes.size() < kChunk; }},
      {"all to one rank", [](const Packet& packet, std::mt19937&) { return packet.to == 2; }},
      {"all from one rank", [](const Packet& packet, std::mt19937&) { return packet.source == 1; }},
      {"half to one rank",
       [](const Packet& packet, std::mt19937&) { return packet.to == 1 && packet.offset / kChunk % 2 == 0; }},
      {"the second half", [](const Packet& packet, std::mt19937&) { return packet.offset >= 5000; }},
  };
  for (const auto& [what, loses] : kinds) {
    SCOPED_TRACE(what);
    Settings settings;
    settings.bytes = 40'400;
    settings.loses = loses;
    expect_all_right(settings, 10);
  }
}

TEST(Spreads, FewLossesAreRepairedAndManySentToAllAgain) {
  Settings few;
  few.hasty = false;
  few.bytes = 400'000;
  few.loses = [](const Packet& packet, std::mt19937&) { return packet.offset == 7 * kChunk; };
  Simulation repaired(multicast_all_gather(4, 1), Kind::kAllGather, few, 1);
  ASSERT_TRUE(repaired.run());
  EXPECT_EQ(repaired.rounds(), 0u);
  EXPECT_EQ(repaired.repaired(), 4 * 3 * kChunk);
  EXPECT_EQ(repaired.packets(), 400u);
  Settings many;
  many.hasty = false;
  many.bytes = 400'000;
  many.loses = share(0.3);
  Simulation again(multicast_all_gather(4, 1), Kind::kAllGather, many, 1);
  ASSERT_TRUE(again.run());
  EXPECT_GE(again.rounds(), 4u);
  EXPECT_LT(again.repaired(), 400'000u / 10);
}

// Takes what it is told, and says nothing.
struct Silent final : PacketMover {
  void arm(uint64_t, uint32_t, uint8_t*, uint64_t) override { ++armed; }
  void disarm(uint64_t) noexcept override { --armed; }
  bool place(uint64_t, uint64_t, const uint8_t*, uint64_t) override { return false; }
  std::vector<Range> missing(uint64_t, size_t) const override { return {{0, 10'000}}; }
  void send(uint64_t, const uint8_t*, uint64_t, uint32_t) override { ++sending; }
  void send_again(uint64_t, const uint8_t*, uint64_t, std::span<const Range>) override { ++sending; }
  void cancel(uint64_t) noexcept override { --sending; }
  int armed = 0, sending = 0;
};

// Rank 0 or 1 of three in a broadcast of 10 KB from rank 0, and what another says to it.
struct Listener {
  explicit Listener(uint32_t rank)
      : job(multicast_broadcast(1), Kind::kBroadcast, 3, 2500, 1),
        operation(job.operation(rank)),
        spreads(rank, mover) {
    spreads.begin(1, *operation->program, operation->places);
    spreads.ready(1, 0);
    spreads.take_effects();
  }
  std::string hear(uint32_t from, FrameType type, uint64_t round = 0, std::vector<Range> ranges = {},
                   uint64_t total = 10'000, uint32_t number = 0) {
    spreads.on_note(from, {type, 1, number, round, total, std::move(ranges)});
    return complaint();
  }
  std::string complaint() {
    for (const Spreads::Effect& effect : spreads.take_effects()) {
      if (effect.kind == Spreads::Effect::Kind::kLied) return effect.text;
    }
    return "";
  }

  Silent mover;
  Job job;
  std::shared_ptr<Operation> operation;
  Spreads spreads;
};

TEST(Lies, ToASource) {
  Listener source(0);
  const auto has_not_sent = [&](FrameType type) { return source.hear(1, type); };
  EXPECT_NE(has_not_sent(FrameType::kHave), "");
  EXPECT_NE(has_not_sent(FrameType::kLacks), "");
  EXPECT_NE(source.hear(1, FrameType::kWant, 0, {{0, 1000}}), "");
  EXPECT_NE(source.hear(1, FrameType::kCast), "");
  EXPECT_NE(source.hear(1, FrameType::kOver), "");
  EXPECT_NE(source.hear(1, FrameType::kArmed, 0, {}, 9'999), "");
  EXPECT_NE(source.hear(1, FrameType::kArmed, 0, {}, 10'000, 1), "");
  EXPECT_NE(source.hear(1, FrameType::kArmed, 0, {}, 10'000, 1 << 24), "");  // the first spread of the next operation
  EXPECT_EQ(source.hear(1, FrameType::kArmed), "");
  EXPECT_NE(source.hear(1, FrameType::kArmed), "");
  EXPECT_EQ(source.hear(2, FrameType::kArmed), "");
  EXPECT_EQ(source.mover.sending, 1);
  source.spreads.on_event({Multicast::Event::Kind::kSent, 1 << 24});
  source.spreads.take_effects();
  EXPECT_NE(source.hear(1, FrameType::kLacks, 2), "");
  const std::vector<std::vector<Range>> senseless = {{{0, 0}},
                                                     {{0, 10'001}},
                                                     {{10'001, 1}},
                                                     {{UINT64_MAX, 2}},
                                                     {{1000, 1000}, {0, 1000}},
                                                     {{0, 1000}, {500, 1000}},
                                                     {{0, 100}},
                                                     {{9'900, 100}, {0, 1}}};
  for (const std::vector<Range>& ranges : senseless) {
    EXPECT_NE(source.hear(1, FrameType::kLacks, 1, ranges), "");
    EXPECT_NE(source.hear(1, FrameType::kWant, 1, ranges), "");
  }
  EXPECT_EQ(source.hear(1, FrameType::kLacks, 1), "");
  EXPECT_NE(source.hear(1, FrameType::kLacks, 1), "");
  EXPECT_EQ(source.hear(1, FrameType::kWant, 1, {{0, 10'000}}), "");
  EXPECT_NE(source.hear(1, FrameType::kWant, 1, {{0, 1}}), "");  // more than the transfer has
  EXPECT_NE(source.hear(1, FrameType::kWant, 1), "");
  EXPECT_EQ(source.hear(1, FrameType::kHave), "");
  EXPECT_NE(source.hear(1, FrameType::kHave), "");
}

TEST(Lies, AskForMoreRoundsThanThereAre) {
  Listener source(0);
  source.hear(1, FrameType::kArmed);
  source.hear(2, FrameType::kArmed);
  source.spreads.on_event({Multicast::Event::Kind::kSent, 1 << 24});
  EXPECT_EQ(source.hear(2, FrameType::kHave), "");
  for (uint64_t round = 1; round < Spreads::kMostRounds; ++round) {
    EXPECT_EQ(source.hear(1, FrameType::kLacks, round, {{0, 1000}}), "");
    source.spreads.on_event({Multicast::Event::Kind::kSent, 1 << 24});
  }
  EXPECT_NE(source.hear(1, FrameType::kLacks, Spreads::kMostRounds, {{0, 1000}}), "");
}

TEST(Lies, ToAReceiver) {
  Listener receiver(1);
  EXPECT_NE(receiver.hear(2, FrameType::kCast, 1), "");  // that is not the source
  EXPECT_NE(receiver.hear(0, FrameType::kCast, 2), "");
  EXPECT_NE(receiver.hear(0, FrameType::kArmed), "");
  EXPECT_NE(receiver.hear(2, FrameType::kHave), "");
  EXPECT_NE(receiver.hear(0, FrameType::kWant, 0, {{0, 1000}}), "");
  EXPECT_EQ(receiver.hear(2, FrameType::kWant, 0, {{0, 10'000}}), "");
  EXPECT_NE(receiver.hear(2, FrameType::kWant, 0, {{0, 1000}}), "");
  const std::vector<uint8_t> bytes(100);
  receiver.spreads.on_repair(2, {1, 0, 0, 100, 10'000, bytes.data()});
  EXPECT_NE(receiver.complaint(), "");  // nobody asked
  EXPECT_EQ(receiver.hear(0, FrameType::kCast, 1), "");
  receiver.spreads.on_event({Multicast::Event::Kind::kQuiet, 1 << 24});
  receiver.spreads.take_effects();
  receiver.spreads.on_repair(0, {1, 0, 9'901, 100, 10'000, bytes.data()});
  EXPECT_NE(receiver.complaint(), "");  // outside
  receiver.spreads.on_repair(0, {1, 0, 0, 0, 10'000, bytes.data()});
  EXPECT_NE(receiver.complaint(), "");
  receiver.spreads.on_repair(0, {1, 0, 0, 100, 9'999, bytes.data()});
  EXPECT_NE(receiver.complaint(), "");
  receiver.spreads.end(1);
  EXPECT_EQ(receiver.mover.armed, 0);
}

}  // namespace
}  // namespace paceline::testing
