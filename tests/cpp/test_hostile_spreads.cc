// A peer that says the wrong thing about transfers to many ranks while this rank is in one. The group may fail, with a
// sentence; no operation may hang, and no byte outside its buffers may be touched.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "transport/bytes.h"
#include "victim.h"

namespace paceline::testing {
namespace {

using namespace std::chrono_literals;

constexpr uint64_t kBytes = 40'000;

// From rank 0 or from rank 1 to the other one.
Job spread_from(uint32_t source) {
  Schedule schedule{"spread", 1, {}};
  schedule.spreads.push_back({0, source, 0});
  return {schedule, Kind::kBroadcast, 2, kBytes / 4, 1};
}

FrameHeader frame(FrameType type, const Call& call) {
  FrameHeader header;
  header.type = type;
  header.seq = 1;
  header.total = kBytes;
  header.call = call;
  return header;
}

struct Saying {
  const char* what;
  FrameType type;
  std::vector<Range> ranges;
  std::function<void(FrameHeader&)> spoil = [](FrameHeader&) {};
};

void say(Impostor& impostor, const Saying& saying, const Call& call) {
  FrameHeader header = frame(saying.type, call);
  std::vector<uint8_t> payload(saying.ranges.size() * kRangeBytes);
  ByteWriter writer(payload.data());
  for (const Range& range : saying.ranges) {
    writer.put(range.offset);
    writer.put(range.bytes);
  }
  header.length = payload.size();
  saying.spoil(header);
  payload.resize(std::min<uint64_t>(header.streamed_bytes(), 200'000));
  impostor.send(header, payload);
}

// Before `saying`, all that the source has to hear until it has sent.
void expect_refused(uint32_t source, const Saying& saying, bool multicast = true, bool armed = false) {
  Victim victim;
  if (multicast) victim.spread_by_multicast();
  Impostor impostor = victim.impostor(Lane::kCollective);
  const Job job = spread_from(source);
  const Pending pending = victim.post(job);
  if (armed) {
    impostor.send(frame(FrameType::kArmed, victim.call()));
    const auto told = impostor.receive_frame();
    ASSERT_TRUE(told.has_value() && told->type == FrameType::kCast) << saying.what;
  }
  say(impostor, saying, victim.call());
  const std::string error = pending.wait(5s);
  EXPECT_TRUE(has(error, "rank 1")) << saying.what << ": " << error;
  EXPECT_FALSE(has(error, "died")) << saying.what << ": " << error;
}

TEST(Sources, FramesThatMakeNoSense) {
  const std::vector<Saying> before = {
      {"has what was not sent", FrameType::kHave, {}},
      {"lacks what was not sent", FrameType::kLacks, {}},
      {"wants what was not sent", FrameType::kWant, {{0, 100}}},
      {"sends what the source has", FrameType::kCast, {}},
      {"repairs what the source has", FrameType::kRepair, {}, [](FrameHeader& header) { header.length = 100; }},
      {"another size", FrameType::kArmed, {}, [](FrameHeader& header) { --header.total; }},
      {"another spread", FrameType::kArmed, {}, [](FrameHeader& header) { header.id = 1; }},
      {"a spread far away", FrameType::kArmed, {}, [](FrameHeader& header) { header.id = UINT32_MAX; }},
      {"another call", FrameType::kArmed, {}, [](FrameHeader& header) { header.call.count = 7; }},
      {"a payload where there is none", FrameType::kArmed, {}, [](FrameHeader& header) { header.length = 64; }},
      {"half a range", FrameType::kWant, {}, [](FrameHeader& header) { header.length = 24; }},
      {"too many ranges",
       FrameType::kWant,
       {},
       [](FrameHeader& header) { header.length = (kMostRanges + 1) * kRangeBytes; }},
  };
  for (const Saying& saying : before) expect_refused(0, saying);
  const std::vector<Saying> after = {
      {"armed twice", FrameType::kArmed, {}},
      {"wants nothing", FrameType::kWant, {}},
      {"wants bytes behind the end", FrameType::kWant, {{kBytes, 1}}},
      {"wants bytes across the end", FrameType::kWant, {{kBytes - 1, 2}}},
      {"wants bytes that wrap around", FrameType::kWant, {{UINT64_MAX, 2}}},
      {"wants all of 64 bits", FrameType::kWant, {{0, UINT64_MAX}}},
      {"wants bytes twice", FrameType::kWant, {{0, 100}, {50, 100}}},
      {"lacks bytes behind the end", FrameType::kLacks, {{kBytes, 1}}, [](FrameHeader& header) { header.offset = 1; }},
      {"answers a round to come", FrameType::kLacks, {{0, 100}}, [](FrameHeader& header) { header.offset = 2; }},
  };
  for (const Saying& saying : after) expect_refused(0, saying, true, true);
}

TEST(Receivers, FramesThatMakeNoSense) {
  const std::vector<Saying> sayings = {
      {"says twice that it is sent", FrameType::kCast, {}, [](FrameHeader& header) { header.offset = 2; }},
      {"is ready for its own", FrameType::kArmed, {}},
      {"has its own", FrameType::kHave, {}},
      {"wants its own", FrameType::kWant, {{0, 100}}},
      {"repairs unasked", FrameType::kRepair, {}, [](FrameHeader& header) { header.length = 100; }},
      {"repairs behind the end",
       FrameType::kRepair,
       {},
       [](FrameHeader& header) {
         header.offset = kBytes;
         header.length = 100;
       }},
      {"too long a repair", FrameType::kRepair, {}, [](FrameHeader& header) { header.length = kMaxPayloadBytes + 1; }},
      {"to this rank alone", FrameType::kData, {}, [](FrameHeader& header) { header.length = 1000; }},
  };
  for (const Saying& saying : sayings) expect_refused(1, saying);
}

TEST(Groups, WithoutMulticastTakeNoFramesOfIt) {
  for (const FrameType type : {FrameType::kArmed, FrameType::kCast, FrameType::kLacks, FrameType::kHave,
                               FrameType::kWant, FrameType::kRepair, FrameType::kOver}) {
    expect_refused(1, {"multicast", type, {}, [](FrameHeader& header) { header.offset = 1; }}, false);
  }
}

// Of a collective that has ended, and of one that comes later.
TEST(Operations, ThatAreNotThere) {
  Victim victim;
  victim.spread_by_multicast();
  Impostor impostor = victim.impostor(Lane::kCollective);
  const Job job = spread_from(0);
  const Pending pending = victim.post(job);
  impostor.send(frame(FrameType::kArmed, victim.call()));
  ASSERT_EQ(impostor.receive_frame()->type, FrameType::kCast);
  impostor.send(frame(FrameType::kHave, victim.call()));
  ASSERT_EQ(pending.wait(5s), "");
  for (const FrameType type : {FrameType::kCast, FrameType::kHave, FrameType::kOver, FrameType::kRepair}) {
    FrameHeader header = frame(type, victim.call());
    if (type == FrameType::kRepair) header.length = 1000;
    impostor.send(header, std::vector<uint8_t>(header.length));
  }
  say(impostor, {"late", FrameType::kWant, {{0, kBytes}}}, victim.call());
  const auto answer = impostor.receive_frame();
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(answer->type, FrameType::kOver);
  EXPECT_EQ(answer->seq, 1u);
  FrameHeader early = frame(FrameType::kArmed, victim.call());
  early.seq = 2;
  impostor.send(early);
  const Job next = spread_from(0);
  const Pending second = victim.post(next);
  const auto told = impostor.receive_frame();
  ASSERT_TRUE(told.has_value());
  EXPECT_EQ(told->type, FrameType::kCast);
  EXPECT_EQ(told->seq, 2u);
  impostor.shut();
  EXPECT_TRUE(has(second.wait(5s), "rank 1")) << second.wait();
}

// It asks for all bytes, and does not read them.
TEST(Receivers, ThatAskAndDoNotRead) {
  Victim victim;
  victim.spread_by_multicast();
  Impostor impostor = victim.impostor(Lane::kCollective);
  const Schedule schedule{"spread", 1, {}, false, false, {{0, 0, 0}}};
  const Job job(schedule, Kind::kBroadcast, 2, 2'000'000, 1);
  const Pending pending = victim.post(job, 3s);
  FrameHeader header = frame(FrameType::kArmed, victim.call());
  header.total = 8'000'000;
  impostor.send(header);
  ASSERT_EQ(impostor.receive_frame()->type, FrameType::kCast);
  say(impostor, {"all", FrameType::kWant, {{0, 8'000'000}}, [](FrameHeader& want) { want.total = 8'000'000; }},
      victim.call());
  const std::string error = pending.wait(10s);
  EXPECT_TRUE(has(error, "Timed out")) << error;
}

}  // namespace
}  // namespace paceline::testing
