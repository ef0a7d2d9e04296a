// Streams that stop or end in the middle: of a frame, of a message, before a collective that is called later. What
// waits for the rest ends, with a sentence.
#include <gtest/gtest.h>

#include <thread>

#include "victim.h"

namespace paceline::testing {
namespace {

using namespace std::chrono_literals;

// The frame of a collective that is not called yet, half of it before the call and half after.
TEST(Halves, AFrameThatTheCallInterrupts) {
  Victim victim;
  Impostor impostor = victim.impostor(Lane::kCollective);
  const Job job = to_zero(1000);
  Call call = job.operation(0)->call;
  call.schedule = job.operation(0)->program->digest();
  const std::vector<uint8_t> bytes = random_bytes(4000, 1);
  impostor.send(data_frame(call, 4000, 0, 4000), std::span(bytes).first(1500));
  std::this_thread::sleep_for(50ms);
  Pending pending = victim.post(job);
  impostor.send(std::span(bytes).subspan(1500));
  EXPECT_EQ(pending.wait(5s), "");
}

TEST(Halves, APeerThatClosesInTheMiddleOfAFrame) {
  for (const bool reset : {false, true}) {
    Victim victim;
    Impostor impostor = victim.impostor(Lane::kCollective);
    const Job job = to_zero(1000);
    Pending pending = victim.post(job);
    impostor.send(data_frame(victim.call(), 4000, 0, 4000), random_bytes(1500, 1));
    if (reset) {
      impostor.reset();
    } else {
      impostor.shut();
    }
    const std::string error = pending.wait();
    EXPECT_TRUE(has(error, "rank 1 (impostor)") && has(error, "its process died")) << error;
  }
}

TEST(Halves, APeerThatStopsInTheMiddleOfAMessage) {
  Victim victim;
  Impostor impostor = victim.impostor(Lane::kMessages);
  std::vector<uint8_t> in(4000);
  Pending pending = victim.message(true, 3, in, 300ms);
  impostor.send(message_frame(FrameType::kMessage, 0, 3, 4000), random_bytes(1500, 1));
  const std::string error = pending.wait(5s);
  EXPECT_TRUE(has(error, "timed out")) << error;
}

TEST(Halves, OneByteAtATime) {
  Victim victim;
  Impostor impostor = victim.impostor(Lane::kMessages);
  std::vector<uint8_t> in(100);
  Pending pending = victim.message(true, 3, in);
  std::array<uint8_t, kFrameHeaderBytes> header;
  encode(message_frame(FrameType::kMessage, 0, 3, 100), header);
  for (const uint8_t& byte : header) {
    impostor.send(std::span(&byte, 1));
    std::this_thread::sleep_for(200us);
  }
  const std::vector<uint8_t> bytes = random_bytes(100, 1);
  for (const uint8_t& byte : bytes) impostor.send(std::span(&byte, 1));
  EXPECT_EQ(pending.wait(), "");
  EXPECT_EQ(in, bytes);
}

// A frame of a later collective that is too large for any, and then the end of the stream.
TEST(Collectives, AHugeEarlyFrameOfAPeerThatHangsUp) {
  Victim victim;
  Impostor impostor = victim.impostor(Lane::kCollective);
  const Job job = to_zero(1000);
  const Pending pending = victim.post(job);
  FrameHeader header = data_frame(Call{}, uint64_t{1} << 60, 0, uint64_t{1} << 60);
  header.seq = 5;
  impostor.send(header, random_bytes(1000, 1));
  std::this_thread::sleep_for(20ms);
  impostor.shut();
  EXPECT_TRUE(has(pending.wait(5s), "rank 1 (impostor) sent bytes that are no frame")) << pending.wait();
}

// The same, where the end of the stream lies behind more than the kernel takes: nobody sees it who does not read.
TEST(Collectives, AnEndBehindAFullWindow) {
  Victim victim;
  Impostor impostor = victim.impostor(Lane::kCollective);
  const Job job = to_zero(1000);
  const Pending pending = victim.post(job);
  FrameHeader header = data_frame(victim.call(), 100000, 0, 100000);
  for (header.seq = 5; header.seq < 9; ++header.seq) impostor.send(header, random_bytes(100000, 1));
  impostor.shut();
  EXPECT_TRUE(has(pending.wait(5s), "rank 1 (impostor)"));
}

// A peer that closes one connection, and sends on the other what nobody has called, fills no memory without end.
TEST(Collectives, AFloodOfAPeerThatHasHungUpElsewhere) {
  Victim victim;
  Impostor impostor = victim.impostor(Lane::kCollective);
  {
    Impostor other = victim.impostor(Lane::kMessages);
  }
  const Job job = to_zero(1000);
  const Pending pending = victim.post(job);
  std::this_thread::sleep_for(20ms);
  const std::vector<uint8_t> payload = random_bytes(100000, 1);
  FrameHeader header = data_frame(victim.call(), payload.size(), 0, payload.size());
  for (header.seq = 5; header.seq < 3000 && !pending.ready(); ++header.seq) impostor.send(header, payload);
  EXPECT_TRUE(has(pending.wait(5s), "rank 1 (impostor) closed a connection, and sends on and on")) << pending.wait();
}

}  // namespace
}  // namespace paceline::testing
