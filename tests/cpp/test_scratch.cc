#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "engine/scratch.h"

namespace paceline {
namespace {

TEST(ScratchPool, GivesAtLeastWhatIsAsked) {
  ScratchPool pool;
  for (const size_t size : {size_t{0}, size_t{1}, size_t{4096}, size_t{4097}, size_t{1} << 20}) {
    const ScratchPool::Buffer buffer = pool.take(size);
    ASSERT_GE(buffer.size(), size);
    std::memset(buffer.data(), 1, buffer.size());
  }
}

TEST(ScratchPool, ReusesWhatCameBackLast) {
  ScratchPool pool;
  uint8_t* first = nullptr;
  uint8_t* second = nullptr;
  {
    const ScratchPool::Buffer a = pool.take(5000);
    first = a.data();
    const ScratchPool::Buffer b = pool.take(5000);
    second = b.data();
    EXPECT_NE(first, second);
  }
  const ScratchPool::Buffer again = pool.take(8192);  // the same power of two; a came back after b
  EXPECT_EQ(again.data(), first);
  EXPECT_EQ(pool.take(8192).data(), second);
}

TEST(ScratchPool, MovingGivesBackWhatWasThere) {
  ScratchPool pool;
  ScratchPool::Buffer a = pool.take(1);
  ScratchPool::Buffer b = pool.take(1);
  uint8_t* const overwritten = b.data();
  uint8_t* const moved = a.data();
  b = std::move(a);
  EXPECT_EQ(b.data(), moved);
  EXPECT_EQ(a.data(), nullptr);  // NOLINT(bugprone-use-after-move): what is left of it is promised
  EXPECT_EQ(pool.take(1).data(), overwritten);
  b = {};
  EXPECT_EQ(b.data(), nullptr);
}

// More than the pool keeps: the oldest are freed, and nothing is freed twice.
TEST(ScratchPool, ForgetsTheOldestBeyondItsLimit) {
  ScratchPool pool;
  std::vector<ScratchPool::Buffer> buffers;
  for (int i = 0; i < 6; ++i) buffers.push_back(pool.take(size_t{64} << 20));
  buffers.clear();
  buffers.push_back(pool.take(size_t{512} << 20));
  buffers.clear();
  EXPECT_GE(pool.take(1).size(), 1u);
}

}  // namespace
}  // namespace paceline
