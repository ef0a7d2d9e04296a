// Payload through shared memory: order, room, and the other side's nonsense.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <deque>
#include <random>
#include <vector>

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

TEST(Rings, ACountThatCannotBeIsALie) {
  Rings rings, other;
  ASSERT_TRUE(rings.open(copy(other)));
  uint64_t lie = uint64_t{1} << 40;
  ASSERT_EQ(::pwrite(other.fd(), &lie, sizeof(lie), 0), static_cast<ssize_t>(sizeof(lie)));
  const std::vector<uint8_t> piece(Rings::kPieceBytes);
  while (rings.put(piece.data(), piece.size())) {
  }
  EXPECT_TRUE(rings.lied_to());
}

}  // namespace
}  // namespace paceline::testing
