// Payload and streams through shared memory: order, room, and the other side's nonsense.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <random>
#include <vector>

#include "impostor.h"
#include "ranks.h"
#include "transport/rings.h"

namespace paceline::testing {
namespace {

Fd copy(const Rings& rings) { return Fd(::dup(rings.fd())); }

struct Pair {
  Rings one, other;
  Pair() {
    EXPECT_TRUE(one.open(copy(other)));
    EXPECT_TRUE(other.open(copy(one)));
  }
};

TEST(Rings, PiecesOfAllSizesComeInOrder) {
  Pair pair;
  std::mt19937 random(1);
  std::deque<std::vector<uint8_t>> sent;
  for (int i = 0; i < 5000; ++i) {
    const std::vector<uint8_t> piece = random_bytes(1 + random() % Rings::kPieceBytes, static_cast<uint32_t>(i));
    while (!pair.one.put(piece.data(), piece.size())) {
      ASSERT_FALSE(sent.empty());
      EXPECT_TRUE(pair.other.peer_waits());
      EXPECT_FALSE(pair.other.peer_waits());  // it is told once
      const uint8_t* got = pair.other.take(sent.front().size());
      ASSERT_EQ(std::memcmp(got, sent.front().data(), sent.front().size()), 0);
      pair.other.release();
      sent.pop_front();
    }
    sent.push_back(piece);
  }
}

TEST(Rings, BeforeTheOtherSideIsKnownThereIsRoomForOneRound) {
  Rings rings;
  const std::vector<uint8_t> piece(Rings::kPieceBytes);
  int pieces = 0;
  while (rings.put(piece.data(), piece.size())) ++pieces;
  EXPECT_EQ(pieces, 8);
  EXPECT_FALSE(rings.lied_to());
}

TEST(Rings, OnlySealedSegmentsOfTheRightSizeAreMapped) {
  Rings rings;
  const Rings other;
  const Fd small(::memfd_create("small", MFD_ALLOW_SEALING));
  EXPECT_FALSE(rings.open(small));
  const Fd unsealed(::memfd_create("unsealed", MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(unsealed.get(), ::lseek(other.fd(), 0, SEEK_END)), 0);
  EXPECT_FALSE(rings.open(unsealed));
  EXPECT_FALSE(rings.open(Fd(::dup(STDIN_FILENO))));
  EXPECT_TRUE(rings.open(copy(other)));
  EXPECT_FALSE(rings.open(copy(other)));
}

// Who is passed a segment can read it, and nothing else.
TEST(Rings, ASegmentIsForReadingOnly) {
  const Rings rings;
  const Fd passed = copy(rings);
  const uint64_t count = 1;
  EXPECT_LT(::pwrite(passed.get(), &count, sizeof(count), 0), 0);
  EXPECT_EQ(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, passed.get(), 0), MAP_FAILED);
  EXPECT_NE(::fcntl(passed.get(), F_ADD_SEALS, F_SEAL_WRITE), 0);
}

constexpr uint64_t kLie = uint64_t{1} << 40;

TEST(Rings, ACountThatCannotBeIsALie) {
  Rings rings;
  Forgery other;
  ASSERT_TRUE(rings.open(Fd(::dup(other.fd()))));
  other.write(kConsumed, kLie);
  const std::vector<uint8_t> piece(Rings::kPieceBytes);
  while (rings.put(piece.data(), piece.size())) {
  }
  EXPECT_TRUE(rings.lied_to());
}

// Bytes in parts of any size, of which as many go as there is room for.
TEST(Stream, BytesComeInOrder) {
  const Pair pair;
  Stream one = pair.one.stream(), other = pair.other.stream();
  std::mt19937 random(2);
  const std::vector<uint8_t> bytes = random_bytes(3 << 20, 4);
  std::vector<uint8_t> got(bytes.size());
  size_t sent = 0, received = 0;
  const auto parts = [&random](uint8_t* from, size_t left) {
    const size_t first = std::min<size_t>(left, random() % 5000),
                 second = std::min<size_t>(left - first, random() % 40000);
    return std::array<iovec, 2>{iovec{from, first}, iovec{from + first, second}};
  };
  while (received < bytes.size()) {
    sent += one.write(parts(const_cast<uint8_t*>(bytes.data()) + sent, bytes.size() - sent));
    ASSERT_LE(sent - received, Stream::kBytes);
    EXPECT_EQ(other.readable(), sent > received);
    received += other.read(parts(got.data() + received, bytes.size() - received));
    ASSERT_LE(received, sent);
  }
  EXPECT_EQ(got, bytes);
  EXPECT_FALSE(one.lied_to() || other.lied_to());
}

TEST(Stream, WhoSleepsIsWokenOnce) {
  const Pair pair;
  Stream one = pair.one.stream(), other = pair.other.stream();
  EXPECT_FALSE(one.finds_sleeper());
  for (int i = 0; i < 3; ++i) {
    other.fall_asleep();
    other.fall_asleep();
    EXPECT_TRUE(one.finds_sleeper());
    EXPECT_FALSE(one.finds_sleeper());
    other.wake_up();
    other.wake_up();
    EXPECT_FALSE(one.finds_sleeper());
  }
}

TEST(Stream, CountsThatCannotBeAreLies) {
  uint8_t byte = 0;
  const iovec part{&byte, 1};
  for (const bool reads : {false, true}) {
    Rings rings;
    Forgery other;
    ASSERT_TRUE(rings.open(Fd(::dup(other.fd()))));
    Stream stream = rings.stream();
    other.write(reads ? kSent : kReceived, kLie);
    EXPECT_EQ(reads ? stream.read(std::span(&part, 1)) : stream.write(std::span(&part, 1)), 0u);
    EXPECT_TRUE(stream.lied_to());
  }
}

}  // namespace
}  // namespace paceline::testing
