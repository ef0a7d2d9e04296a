// Memory that is moved to huge pages once it has come back often, and never more than that.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/utsname.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>

#include "transport/huge_pages.h"

namespace paceline::testing {
namespace {

constexpr size_t kHugePage = 2 << 20, kBlock = 8 << 20;

// Where there are huge pages for those who ask, and a kernel that tells them apart (6.7).
bool huge_pages_are_given() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string modes;
  std::getline(file, modes);
  utsname system{};
  int major = 0, minor = 0;
  const bool known = ::uname(&system) == 0 && std::sscanf(system.release, "%d.%d", &major, &minor) == 2;
  return known && std::pair(major, minor) >= std::pair(6, 7) && modes.find("[madvise]") != std::string::npos;
}

// Memory that begins at a huge page's address, in small pages.
class Block {
 public:
  Block() {
    void* mapped =
        ::mmap(nullptr, kBlock + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    EXPECT_NE(mapped, MAP_FAILED);
    mapped_ = static_cast<uint8_t*>(mapped);
    const auto address = reinterpret_cast<uint64_t>(mapped);
    begin_ = mapped_ + (kHugePage - address % kHugePage) % kHugePage;
    std::memset(begin_, 1, kBlock);
  }
  ~Block() { ::munmap(mapped_, kBlock + kHugePage); }
  uint8_t* begin() const { return begin_; }

 private:
  uint8_t* mapped_;
  uint8_t* begin_;
};

void count(HugePages& pages, const void* chunk, uint32_t times) {
  for (uint32_t i = 0; i < times; ++i) pages.count_small(chunk);
}

class HugePagesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!huge_pages_are_given()) GTEST_SKIP() << "no huge pages on request here, or nobody tells";
  }
};

TEST_F(HugePagesTest, AreTold) {
  const HugePages pages(true);
  const Block block;
  EXPECT_FALSE(pages.hold(block.begin(), kBlock));
  ::madvise(block.begin(), kBlock, MADV_DONTNEED);
  ::madvise(block.begin(), kBlock, MADV_HUGEPAGE);
  std::memset(block.begin(), 1, kBlock);  // this time in huge ones
  EXPECT_TRUE(pages.hold(block.begin(), kBlock));
}

TEST_F(HugePagesTest, MemoryThatComesBackIsMoved) {
  HugePages pages(true);
  const Block block;
  for (size_t i = 0; i < kBlock; ++i) block.begin()[i] = static_cast<uint8_t>(i % 251);
  count(pages, block.begin(), HugePages::kOften - 1);
  EXPECT_FALSE(pages.due());
  EXPECT_FALSE(pages.improve(block.begin(), kBlock, block.begin(), kBlock));
  count(pages, block.begin(), 1);
  EXPECT_TRUE(pages.due());
  EXPECT_TRUE(pages.improve(block.begin(), kBlock, block.begin(), kBlock));
  EXPECT_FALSE(pages.due());
  EXPECT_TRUE(pages.hold(block.begin(), kBlock));
  for (size_t i = 0; i < kBlock; ++i) ASSERT_EQ(block.begin()[i], i % 251);
  // It needs more to be moved again.
  count(pages, block.begin(), HugePages::kOften);
  EXPECT_FALSE(pages.due());
}

TEST_F(HugePagesTest, OnlyWithinTheBuffer) {
  HugePages pages(true);
  const Block block;
  // The buffer has the second half of the first huge page, and the first half of the last.
  uint8_t* buffer = block.begin() + kHugePage / 2;
  const size_t bytes = kBlock - kHugePage;
  uint8_t* chunk = buffer + kHugePage;  // from the middle of a page to the middle of the next
  count(pages, chunk, HugePages::kOften);
  EXPECT_TRUE(pages.improve(chunk, kHugePage, buffer, bytes));
  EXPECT_FALSE(pages.hold(block.begin(), kHugePage));
  EXPECT_TRUE(pages.hold(block.begin() + kHugePage, kHugePage));
  EXPECT_TRUE(pages.hold(block.begin() + 2 * kHugePage, kHugePage));
  EXPECT_FALSE(pages.hold(block.begin() + 3 * kHugePage, kHugePage));
}

TEST_F(HugePagesTest, AFailureIsRemembered) {
  HugePages pages(true);
  void* hole = nullptr;
  {
    const Block block;
    hole = block.begin();
  }
  count(pages, hole, HugePages::kOften);
  EXPECT_TRUE(pages.improve(hole, kBlock, hole, kBlock));
  count(pages, hole, 100 * HugePages::kOften);
  EXPECT_FALSE(pages.due());
}

TEST_F(HugePagesTest, AreOnlyFoundWhereNothingMayBeMoved) {
  HugePages pages(false);
  const Block block;
  count(pages, block.begin(), 10 * HugePages::kOften);
  EXPECT_FALSE(pages.due());
}

TEST_F(HugePagesTest, MemoryThatDoesNotComeBackIsForgotten) {
  HugePages pages(true);
  const Block block;
  count(pages, block.begin(), HugePages::kOften - 1);
  for (size_t i = 1; i < 5000; ++i) pages.count_small(block.begin() + i);
  count(pages, block.begin(), 1);
  EXPECT_FALSE(pages.due());
}

}  // namespace
}  // namespace paceline::testing
