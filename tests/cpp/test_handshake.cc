// Frames and handshakes as bytes: round trips, and what is no frame or hello.
#include <gtest/gtest.h>

#include <array>
#include <random>
#include <span>

#include "transport/frame.h"
#include "transport/handshake.h"

namespace paceline {
namespace {

using FrameBytes = std::array<uint8_t, kFrameHeaderBytes>;

bool read(const FrameBytes& bytes, FrameHeader* header) {
  return decode(std::span<const uint8_t, kFrameHeaderBytes>(bytes), header);
}

TEST(Frame, RoundTripOfRandomHeaders) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 10000; ++i) {
    FrameHeader sent;
    sent.type = static_cast<FrameType>(1 + random() % 18);
    sent.id = static_cast<uint32_t>(random());
    sent.seq = random();
    sent.offset = random() >> 2;
    sent.length = 1;
    const bool carries = sent.type != FrameType::kAt && sent.streamed_bytes() > 0;
    sent.length = carries ? random() % (kMaxChoiceBytes + 1) : random() >> 2;
    sent.total = random() >> 2;
    sent.shared = sent.type == FrameType::kData && sent.length > 0 && random() % 2 == 0;
    sent.call = {static_cast<Kind>(random() % 9),
                 static_cast<DType>(random() % 14),
                 static_cast<ReduceOp>(random() % 8),
                 static_cast<uint8_t>(random()),
                 static_cast<int32_t>(random()),
                 random(),
                 random()};
    FrameBytes bytes;
    encode(sent, bytes);
    FrameHeader got;
    ASSERT_TRUE(read(bytes, &got));
    EXPECT_EQ(got.type, sent.type);
    EXPECT_EQ(got.id, sent.id);
    EXPECT_EQ(got.seq, sent.seq);
    EXPECT_EQ(got.offset, sent.offset);
    EXPECT_EQ(got.length, sent.length);
    EXPECT_EQ(got.total, sent.total);
    EXPECT_EQ(got.shared, sent.shared);
    EXPECT_EQ(got.call, sent.call);
  }
}

TEST(Frame, LittleEndianOnTheWire) {
  FrameHeader header;
  header.type = FrameType::kPosted;
  header.id = 0x04030201;
  header.seq = 0x0c0b0a0908070605;
  FrameBytes bytes;
  encode(header, bytes);
  EXPECT_EQ(bytes[0], 'P');
  EXPECT_EQ(bytes[1], 'c');
  EXPECT_EQ(bytes[2], 2);
  for (uint8_t i = 1; i <= 12; ++i) EXPECT_EQ(bytes[3 + i], i);
}

TEST(Frame, RejectsWhatIsNoFrame) {
  FrameHeader header;
  header.type = FrameType::kError;
  header.length = kMaxErrorBytes;
  FrameBytes bytes;
  encode(header, bytes);
  FrameHeader got;
  ASSERT_TRUE(read(bytes, &got));
  for (const size_t at : {0, 1, 3}) {  // magic, and a flag that is neither set nor not
    FrameBytes broken = bytes;
    broken[at] ^= 0x10;
    EXPECT_FALSE(read(broken, &got)) << at;
  }
  for (const uint8_t type : {0, 20, 255}) {
    FrameBytes broken = bytes;
    broken[2] = type;
    EXPECT_FALSE(read(broken, &got)) << int{type};
  }
  header.length = kMaxErrorBytes + 1;
  encode(header, bytes);
  EXPECT_FALSE(read(bytes, &got));
}

TEST(Frame, NoSumOfOffsetAndLengthCanWrap) {
  for (uint64_t FrameHeader::* const field : {&FrameHeader::offset, &FrameHeader::length, &FrameHeader::total}) {
    FrameHeader header;
    header.*field = UINT64_MAX;
    FrameBytes bytes;
    encode(header, bytes);
    FrameHeader got;
    EXPECT_FALSE(read(bytes, &got));
  }
}

TEST(Call, Text) {
  EXPECT_EQ((Call{Kind::kAllReduce, DType::kFloat32, ReduceOp::kSum, 0, 0, 1000, 0}.text()),
            "allreduce(float32[1000], sum)");
  EXPECT_EQ((Call{Kind::kBroadcast, DType::kBytes, ReduceOp::kSum, 0, 3, 8, 0}.text()), "broadcast(bytes[8], root 3)");
  EXPECT_EQ(Call{}.text(), "barrier()");
  // From a hostile frame: every byte has a name.
  for (int i = 0; i < 256; ++i) {
    const auto byte = static_cast<uint8_t>(i);
    const Call call{static_cast<Kind>(byte), static_cast<DType>(byte), static_cast<ReduceOp>(byte), 0, -1, 1, 0};
    EXPECT_FALSE(call.text().empty());
  }
}

Hello some_hello() {
  Hello hello;
  hello.lane = Lane::kMessages;
  hello.group.fill(3);
  hello.epoch = 0x0102030405060708;
  hello.from_rank = 5;
  hello.to_rank = 6;
  hello.nonce = random_nonce();
  return hello;
}

TEST(Handshake, HelloRoundTrip) {
  const Hello sent = some_hello();
  const HelloBytes bytes = encode(sent, Secret{});
  Hello got;
  ASSERT_TRUE(decode(std::span<const uint8_t, kHelloBytes>(bytes), &got));
  EXPECT_EQ(got.version, kProtocolVersion);
  EXPECT_EQ(got.lane, sent.lane);
  EXPECT_EQ(got.group, sent.group);
  EXPECT_EQ(got.epoch, sent.epoch);
  EXPECT_EQ(got.from_rank, sent.from_rank);
  EXPECT_EQ(got.to_rank, sent.to_rank);
  EXPECT_EQ(got.nonce, sent.nonce);
}

TEST(Handshake, HelloRejected) {
  const HelloBytes bytes = encode(some_hello(), Secret{});
  Hello got;
  for (size_t at = 0; at < 8; ++at) {
    HelloBytes broken = bytes;
    broken[at] ^= 0x20;
    EXPECT_FALSE(decode(std::span<const uint8_t, kHelloBytes>(broken), &got));
  }
  HelloBytes broken = bytes;
  broken[10] = kLanes.size();
  EXPECT_FALSE(decode(std::span<const uint8_t, kHelloBytes>(broken), &got));
}

TEST(Handshake, WelcomeRoundTripAndRejection) {
  for (const bool accepted : {true, false}) {
    Welcome sent;
    sent.accepted = accepted;
    sent.nonce = random_nonce();
    sent.proof.fill(9);
    WelcomeBytes bytes = encode(sent);
    Welcome got;
    ASSERT_TRUE(decode(std::span<const uint8_t, kWelcomeBytes>(bytes), &got));
    EXPECT_EQ(got.accepted, accepted);
    EXPECT_EQ(got.nonce, sent.nonce);
    EXPECT_EQ(got.proof, sent.proof);
    for (size_t at = 0; at < 8; ++at) {
      WelcomeBytes broken = bytes;
      broken[at] ^= 0x42;
      EXPECT_FALSE(decode(std::span<const uint8_t, kWelcomeBytes>(broken), &got));
    }
  }
}

// A proof is for one secret, one hello, one nonce and one role.
TEST(Handshake, ProofsDependOnEverything) {
  Secret secret{};
  const HelloBytes hello = encode(some_hello(), secret);
  const Nonce nonce = random_nonce();
  const Digest proof = prove_acceptor(secret, hello, nonce, true);
  EXPECT_NE(proof, prove_acceptor(secret, hello, nonce, false));  // a refusal is no acceptance that lost a bit
  EXPECT_EQ(proof, prove_acceptor(secret, hello, nonce, true));
  EXPECT_NE(proof, prove_initiator(secret, hello, nonce));
  EXPECT_TRUE(proven(hello, secret));
  for (size_t i = 0; i < hello.size(); ++i) {
    HelloBytes other = hello;
    other[i] ^= 1;
    EXPECT_NE(proof, prove_acceptor(secret, other, nonce, true));
    EXPECT_FALSE(proven(other, secret));
  }
  Nonce other_nonce = nonce;
  other_nonce[15] ^= 1;
  EXPECT_NE(proof, prove_acceptor(secret, hello, other_nonce, true));
  secret[31] ^= 1;
  EXPECT_NE(proof, prove_acceptor(secret, hello, nonce, true));
  EXPECT_FALSE(proven(hello, secret));
}

}  // namespace
}  // namespace paceline
