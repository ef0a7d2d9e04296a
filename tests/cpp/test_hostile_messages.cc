// A peer that says the wrong thing on the connection for messages: what waits for one ends, with a sentence.
#include <gtest/gtest.h>

#include <functional>

#include "victim.h"

namespace paceline::testing {
namespace {

using namespace std::chrono_literals;

TEST(Messages, FramesThatMakeNoSense) {
  using Send = std::function<void(Impostor&)>;
  const std::vector<std::pair<const char*, Send>> sends = {
      {"data", [](Impostor& i) { i.send(data_frame(Call{}, 100, 0, 100), random_bytes(100, 1)); }},
      {"data of a collective", [](Impostor& i) { i.send(data_frame(Call{}, 100, 0, 8000), random_bytes(8000, 1)); }},
      {"posted", [](Impostor& i) { i.send(message_frame(FrameType::kPosted, 0, 3, 100)); }},
      {"not offered", [](Impostor& i) { i.send(message_frame(FrameType::kMessage, 0, 3, 100000)); }},
      {"huge", [](Impostor& i) { i.send(message_frame(FrameType::kMessage, 0, 3, uint64_t{1} << 60)); }},
      {"not offered, but awaited", [](Impostor& i) { i.send(message_frame(FrameType::kMessage, 0, 4, 100000)); }},
      {"credit for nothing", [](Impostor& i) { i.send(message_frame(FrameType::kCredit, 0, 0, 1)); }},
      {"accept of nothing", [](Impostor& i) { i.send(message_frame(FrameType::kAccept, 0, 3, 0)); }},
      {"a number from the future", [](Impostor& i) { i.send(message_frame(FrameType::kOffer, 5, 9, 100000)); }},
      {"a number twice",
       [](Impostor& i) {
         i.send(message_frame(FrameType::kOffer, 0, 9, 100000));
         i.send(message_frame(FrameType::kOffer, 0, 9, 100000));
       }},
  };
  for (const bool shm : {false, true}) {
    for (const auto& [what, send] : sends) {
      Victim victim(shm);
      Impostor impostor = victim.impostor(Lane::kMessages);
      std::vector<uint8_t> in(200);
      Pending pending = victim.message(true, 4, in);
      send(impostor);
      const std::string error = pending.wait(5s);
      EXPECT_TRUE(has(error, "rank 1 (impostor)")) << what << ": " << error;
      EXPECT_FALSE(has(error, "died")) << what << ": " << error;
    }
  }
}

// Accepted twice, the second time when the sender's buffer may be gone.
TEST(Messages, AcceptedTwice) {
  Victim victim;
  Impostor impostor = victim.impostor(Lane::kMessages);
  auto out = std::make_unique<std::vector<uint8_t>>(random_bytes(8 << 20, 1));
  Pending pending = victim.message(false, 3, *out);
  const std::optional<FrameHeader> offer = impostor.receive_frame();
  ASSERT_TRUE(offer && offer->type == FrameType::kOffer);
  impostor.send(message_frame(FrameType::kAccept, offer->seq, 3, 0));
  impostor.send(message_frame(FrameType::kAccept, offer->seq, 3, 0));
  const std::string error = pending.wait();
  out.reset();
  EXPECT_TRUE(has(error, "rank 1 (impostor)")) << error;
}

// An eager message needs no leave: accepting it would send it twice.
TEST(Messages, AcceptOfAMessageThatWasNotOffered) {
  Victim victim;
  Impostor impostor = victim.impostor(Lane::kMessages);
  std::vector<uint8_t> out(100), in(100);
  Pending waiting = victim.message(true, 9, in);
  EXPECT_EQ(victim.message(false, 3, out).wait(), "");
  impostor.send(message_frame(FrameType::kAccept, 0, 3, 0));
  EXPECT_TRUE(has(waiting.wait(), "accepted a message it was not offered")) << waiting.wait();
}

// What is sent without being asked for is bounded, however small: by bytes, by number, and as mere offers.
TEST(Messages, MoreThanIsKept) {
  for (const uint64_t length : {60000, 1, 0}) {
    Victim victim;
    Impostor impostor = victim.impostor(Lane::kMessages);
    const std::vector<uint8_t> bytes(length);
    for (uint64_t i = 0; i < 5000; ++i) impostor.send(message_frame(FrameType::kMessage, i, 3, length), bytes);
    EXPECT_TRUE(has(victim.fails(), "sent more messages than it may")) << length << victim.failure();
  }
  Victim victim;
  Impostor impostor = victim.impostor(Lane::kMessages);
  for (uint64_t i = 0; i < 20000; ++i) impostor.send(message_frame(FrameType::kOffer, i, 3, uint64_t{1} << 40));
  EXPECT_TRUE(has(victim.fails(), "sent more messages than it may")) << victim.failure();
}

// A peer that receives nothing gets a megabyte, and then offers; when it has room, messages again.
TEST(Messages, ASenderKeepsToItsCredit) {
  Victim victim;
  Impostor impostor = victim.impostor(Lane::kMessages);
  std::vector<uint8_t> out = random_bytes(60000, 1);
  std::vector<Pending> sent;
  sent.reserve(31);
  for (int i = 0; i < 30; ++i) sent.push_back(victim.message(false, 3, out));
  std::vector<FrameHeader> frames;
  for (int i = 0; i < 30; ++i) {
    const std::optional<FrameHeader> frame = impostor.receive_frame();
    ASSERT_TRUE(frame) << i;
    frames.push_back(*frame);
    EXPECT_EQ(frame->type, i < 17 ? FrameType::kMessage : FrameType::kOffer) << i;
  }
  EXPECT_EQ(sent[16].wait(), "");
  EXPECT_FALSE(sent[17].ready());
  impostor.send(message_frame(FrameType::kCredit, 0, 0, 70000));
  impostor.send(message_frame(FrameType::kAccept, frames[29].seq, 0, 0));
  std::optional<FrameHeader> frame = impostor.receive_frame();
  ASSERT_TRUE(frame && frame->type == FrameType::kMessage && frame->seq == 29);
  sent.push_back(victim.message(false, 3, out));
  frame = impostor.receive_frame();
  ASSERT_TRUE(frame && frame->type == FrameType::kMessage && frame->seq == 30);
}

// Whatever else is to be said goes between the slices of a large message: a question is answered long before its end.
TEST(Messages, AnAnswerDoesNotWaitForALargeMessage) {
  std::vector<uint8_t> out(64 << 20);  // outlives the rank that sends it
  Victim victim;
  Impostor impostor = victim.impostor(Lane::kMessages);
  const Pending pending = victim.message(false, 3, out);
  std::optional<FrameHeader> frame = impostor.receive_frame();
  ASSERT_TRUE(frame && frame->type == FrameType::kOffer);
  impostor.send(message_frame(FrameType::kAccept, frame->seq, 3, 0));
  frame = impostor.receive_frame();  // it is under way
  ASSERT_TRUE(frame && frame->type == FrameType::kMessage);
  FrameHeader probe;
  probe.type = FrameType::kProbe;
  impostor.send(probe);
  uint64_t before = 0;  // bytes of the message
  while ((frame = impostor.receive_frame()) && frame->type == FrameType::kMessage)
    before = frame->offset + frame->length;
  ASSERT_TRUE(frame && frame->type == FrameType::kStatus);
  EXPECT_LT(before, out.size() / 2);  // what the kernels held
}

}  // namespace
}  // namespace paceline::testing
