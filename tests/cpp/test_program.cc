// Programs: the timelines of a rank's chunks, what waits for what, and rows that make no sense.
#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include "engine/program.h"
#include "ranks.h"

namespace paceline {
namespace {

constexpr bool kRead = false, kWrite = true;

Program make(const std::vector<Row>& rows, uint32_t num_ranks = 4, uint32_t num_chunks = 4) {
  return {0, num_ranks, num_chunks, 7, "test", rows};
}

TEST(Program, ReadsOfAStepComeBeforeItsWrites) {
  const Program program = make({{0, 1, 2, 1, kWrite, true}, {0, 2, 2, 1, kRead, false}});
  ASSERT_EQ(program.accesses().size(), 2u);
  const Access& read = program.accesses()[0];
  const Access& write = program.accesses()[1];
  EXPECT_FALSE(read.write);
  EXPECT_TRUE(write.write);
  EXPECT_TRUE(write.reduce);
  EXPECT_TRUE(read.from_input);
  EXPECT_TRUE(write.from_input);
  EXPECT_EQ(write.previous_write, -1);
  EXPECT_EQ(write.first_read, 0u);
  EXPECT_EQ(read.end, 2u);   // the write waits for it
  EXPECT_EQ(write.end, 2u);  // nothing does
}

TEST(Program, TimelineOfOneChunk) {
  // write, read, read, write, read: of steps 0, 1, 1, 2, 3, listed out of order.
  const Program program = make({{3, 1, 0, 1, kRead, false},
                                {1, 2, 0, 1, kRead, false},
                                {0, 3, 0, 1, kWrite, false},
                                {1, 1, 0, 1, kRead, false},
                                {2, 2, 0, 1, kWrite, true}});
  const std::vector<Access>& accesses = program.accesses();
  ASSERT_EQ(accesses.size(), 5u);
  const std::vector<bool> writes = {true, false, false, true, false};
  const std::vector<int32_t> previous = {-1, 0, 0, 0, 3};
  const std::vector<uint32_t> peers = {3, 2, 1, 2, 1};  // the schedule's order within a step
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(accesses[i].write, writes[i]) << i;
    EXPECT_EQ(accesses[i].previous_write, previous[i]) << i;
    EXPECT_EQ(accesses[i].peer, peers[i]) << i;
    EXPECT_EQ(accesses[i].from_input, i == 0) << i;
  }
  EXPECT_EQ(accesses[3].first_read, 1u);
  EXPECT_EQ(accesses[0].end, 4u);  // both reads and the next write wait for the first write
  EXPECT_EQ(accesses[1].end, 4u);
  EXPECT_EQ(accesses[3].end, 5u);
}

TEST(Program, WritesOfOneStepKeepTheirOrder) {
  const Program program = make({{0, 1, 0, 1, kWrite, true}, {0, 2, 0, 1, kWrite, true}, {0, 1, 0, 1, kRead, false}});
  EXPECT_EQ(program.accesses()[2].previous_write, 1);
  EXPECT_EQ(program.accesses()[1].peer, 1u);  // as listed, so that sums have the same bits in every run
  EXPECT_EQ(program.accesses()[2].peer, 2u);
}

TEST(Program, ChunksHaveTimelinesOfTheirOwn) {
  const Program program = make({{0, 1, 0, 4, kRead, false}, {1, 2, 1, 2, kWrite, false}});
  ASSERT_EQ(program.accesses().size(), 6u);
  for (const Access& access : program.accesses()) {
    EXPECT_EQ(program.accesses()[access.first_read].chunk, access.chunk);
    for (uint32_t next = static_cast<uint32_t>(&access - program.accesses().data()); next < access.end; ++next) {
      EXPECT_EQ(program.accesses()[next].chunk, access.chunk);
    }
  }
  EXPECT_EQ(program.written(), (std::vector<bool>{false, true, true, false}));
}

// Both sides number the transfers between two ranks alike, whatever else they take part in.
TEST(Program, WiresHaveTheSameNumbersOnBothSides) {
  for (const uint32_t n : {2u, 3u, 4u, 7u}) {
    for (const testing::Schedule& schedule :
         {testing::ring_all_reduce(n), testing::direct_all_reduce(n), testing::chain_broadcast(n, 5)}) {
      std::vector<std::shared_ptr<const Program>> programs;
      for (uint32_t rank = 0; rank < n; ++rank) programs.push_back(schedule.program(rank, n));
      for (uint32_t a = 0; a < n; ++a) {
        for (uint32_t b = 0; b < n; ++b) {
          const Program::Peer* sender = programs[a]->find_peer(b);
          const Program::Peer* receiver = programs[b]->find_peer(a);
          ASSERT_EQ(sender == nullptr, receiver == nullptr);
          if (sender == nullptr) continue;
          ASSERT_EQ(sender->sends.size(), receiver->receives.size());
          for (size_t wire = 0; wire < sender->sends.size(); ++wire) {
            const Access& read = programs[a]->accesses()[sender->sends[wire]];
            const Access& write = programs[b]->accesses()[receiver->receives[wire]];
            EXPECT_EQ(read.chunk, write.chunk);
            EXPECT_EQ(read.wire, wire);
            EXPECT_EQ(write.wire, wire);
            EXPECT_FALSE(read.write);
            EXPECT_TRUE(write.write);
          }
        }
      }
    }
  }
}

TEST(Program, AnEmptyOneIsAProgram) {
  const Program program = make({});
  EXPECT_TRUE(program.accesses().empty());
  EXPECT_TRUE(program.peers().empty());
  EXPECT_EQ(program.find_peer(1), nullptr);
}

TEST(Program, RejectsRowsOutOfRange) {
  EXPECT_THROW(make({{0, 4, 0, 1, kRead, false}}), std::invalid_argument);           // no such rank
  EXPECT_THROW(make({{0, 0, 0, 1, kRead, false}}), std::invalid_argument);           // itself
  EXPECT_THROW(make({{0, 1, 4, 1, kRead, false}}), std::invalid_argument);           // no such chunk
  EXPECT_THROW(make({{0, 1, 3, 2, kRead, false}}), std::invalid_argument);           // one too many
  EXPECT_THROW(make({{0, 1, 0, 0, kRead, false}}), std::invalid_argument);           // none
  EXPECT_THROW(make({{0, 1, 1, UINT32_MAX, kRead, false}}), std::invalid_argument);  // wraps around
  EXPECT_THROW(make({{0, UINT32_MAX, 0, 1, kWrite, false}}), std::invalid_argument);
  EXPECT_THROW(Program(2, 2, 1, 0, "", {}), std::invalid_argument);
  EXPECT_THROW(Program(0, 1, 0, 0, "", {}), std::invalid_argument);
  EXPECT_NO_THROW(make({{UINT32_MAX, 1, 0, 4, kRead, false}, {UINT32_MAX, 1, 0, 4, kWrite, true}}));
}

}  // namespace
}  // namespace paceline
