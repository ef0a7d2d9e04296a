// Transfers with many destinations through the engine and real packets on loopback: every result is compared.
#include <gtest/gtest.h>

#include <atomic>
#include <random>

#include "ranks.h"

namespace paceline::testing {
namespace {

using namespace std::chrono_literals;

constexpr uint32_t kRanks = 4;

// Loses packets by chance, the same share on the way to each rank.
Ranks::Filter losing(double share) {
  return [share](uint32_t rank, std::span<const uint8_t>) {
    thread_local std::mt19937 random(rank + 1);
    return std::uniform_real_distribution<>(0, 1)(random) >= share;
  };
}

void expect_right(Ranks& ranks, const Schedule& schedule, Kind kind, uint64_t count, uint32_t seed = 1) {
  const Job job(schedule, kind, ranks.size(), count, seed);
  std::vector<Pending> pending;
  for (uint32_t rank = 0; rank < ranks.size(); ++rank) pending.push_back(ranks.post(rank, job.operation(rank)));
  for (const Pending& entry : pending) ASSERT_EQ(entry.wait(), "");
  EXPECT_TRUE(job.right()) << schedule.name << " of " << count;
}

uint64_t packets_sent(Ranks& ranks, size_t group = 0) {
  uint64_t packets = 0;
  for (uint32_t rank = 0; rank < ranks.size(); ++rank) {
    packets += ranks.group(rank, group)->multicast()->counters().packets_sent;
  }
  return packets;
}

class Lossy : public ::testing::TestWithParam<double> {};

TEST_P(Lossy, EveryRankHasEverything) {
  Ranks ranks(kRanks, {});
  ranks.spread_by_multicast(0, losing(GetParam()));
  for (const uint64_t count : {1, 5000, 100000, 1000003}) {
    for (const uint32_t chains : {1u, 2u, 3u}) {
      expect_right(ranks, multicast_all_gather(kRanks, chains), Kind::kAllGather, count);
    }
    expect_right(ranks, multicast_broadcast(1), Kind::kBroadcast, count);
    expect_right(ranks, multicast_broadcast(5), Kind::kBroadcast, count);
    expect_right(ranks, multicast_behind_chain(kRanks), Kind::kBroadcast, count);
  }
  EXPECT_GT(packets_sent(ranks), 1000u);
}

INSTANTIATE_TEST_SUITE_P(Shares, Lossy, ::testing::Values(0.0, 0.01, 0.1, 0.3, 1.0));

TEST(Spreads, WithoutMulticastTheyGoToEachRankAlone) {
  Ranks ranks(kRanks, {});
  expect_right(ranks, multicast_all_gather(kRanks, 2), Kind::kAllGather, 100000);
  expect_right(ranks, multicast_broadcast(3), Kind::kBroadcast, 100000);
}

TEST(Spreads, RanksOfOneHostThatShareMemory) {
  Ranks ranks(3, {.shm = true});
  ranks.spread_by_multicast(0, losing(0.1));
  for (int i = 0; i < 5; ++i) expect_right(ranks, multicast_all_gather(3, 1), Kind::kAllGather, 300000);
}

TEST(Spreads, ManyOperationsAtOnceAndTwoGroups) {
  Ranks ranks(kRanks, {});
  ranks.add_group();
  ranks.spread_by_multicast(0, losing(0.02));
  ranks.spread_by_multicast(1, losing(0.02));
  std::vector<std::unique_ptr<Job>> jobs;
  std::vector<Pending> pending;
  for (uint32_t i = 0; i < 20; ++i) {
    const bool gathers = i % 3 != 0;
    jobs.push_back(std::make_unique<Job>(gathers ? multicast_all_gather(kRanks, 2) : ring_all_reduce(kRanks),
                                         gathers ? Kind::kAllGather : Kind::kAllReduce, kRanks, 50000, i));
  }
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    for (uint32_t i = 0; i < jobs.size(); ++i) pending.push_back(ranks.post(rank, jobs[i]->operation(rank), i / 2 % 2));
  }
  for (const Pending& entry : pending) ASSERT_EQ(entry.wait(), "");
  for (const auto& job : jobs) EXPECT_TRUE(job->right());
}

// Rank 3 lacks a packet of the first operation, and asks rank 2, which has forgotten by then what it called.
TEST(Spreads, ANeighbourIsAskedManyCallsLater) {
  constexpr uint32_t kCalls = 400;
  Ranks ranks(kRanks, {});
  ranks.spread_by_multicast(0, [](uint32_t rank, std::span<const uint8_t> packet) {
    const bool first_chunk = packet[12] == 0 && packet[13] == 0 && packet[16] == 0;
    const bool first_call = packet[19] == 1 && packet[20] == 0;  // the upper bytes of the number count operations
    return rank != 3 || !first_chunk || !first_call;
  });
  std::vector<std::unique_ptr<Job>> jobs;
  std::vector<Pending> pending;
  for (uint32_t i = 0; i < kCalls; ++i) {
    jobs.push_back(std::make_unique<Job>(multicast_broadcast(1), Kind::kBroadcast, kRanks, 5000, i));
  }
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    for (const auto& job : jobs) pending.push_back(ranks.post(rank, job->operation(rank)));
  }
  for (const Pending& entry : pending) ASSERT_EQ(entry.wait(), "");
  for (const auto& job : jobs) EXPECT_TRUE(job->right());
  EXPECT_GT(ranks.engine(3).packet_counters(ranks.group(3))->spreads.repaired_bytes, 0u);
}

TEST(Spreads, ALateRankIsWaitedFor) {
  Ranks ranks(kRanks, {});
  ranks.spread_by_multicast();
  for (uint32_t late = 0; late < kRanks; ++late) {
    const Job job(multicast_all_gather(kRanks, 2), Kind::kAllGather, kRanks, 100000, late);
    std::vector<Pending> pending;
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      if (rank != late) pending.push_back(ranks.post(rank, job.operation(rank)));
    }
    std::this_thread::sleep_for(100ms);
    for (const Pending& entry : pending) EXPECT_FALSE(entry.ready());
    pending.push_back(ranks.post(late, job.operation(late)));
    for (const Pending& entry : pending) ASSERT_EQ(entry.wait(), "");
    EXPECT_TRUE(job.right());
  }
}

// The packets to one rank are lost, and it is killed while it asks for them.
TEST(Spreads, ARankThatDiesEndsTheGroup) {
  for (const uint32_t victim : {0u, 2u}) {
    Ranks ranks(kRanks, {});
    ranks.spread_by_multicast(0, {}, {2'000'000, 2'000'000});
    const Job job(multicast_broadcast(1), Kind::kBroadcast, kRanks, 1'000'000, 1);
    std::vector<Pending> pending;
    for (uint32_t rank = 0; rank < kRanks; ++rank) pending.push_back(ranks.post(rank, job.operation(rank)));
    std::this_thread::sleep_for(200ms);
    ranks.kill(victim);
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      if (rank == victim) continue;
      const std::string error = pending[rank].wait();
      EXPECT_TRUE(has(error, "rank " + std::to_string(victim) + " (host")) << error;
    }
  }
}

// What was in flight is given back to its owner, who may free it at once: the sanitizers would see a late write.
TEST(Spreads, NothingIsWrittenAfterAFailure) {
  Ranks ranks(kRanks, {});
  ranks.spread_by_multicast(0, {}, {50'000'000, 50'000'000});
  {
    const Job job(multicast_all_gather(kRanks, 4), Kind::kAllGather, kRanks, 4'000'000, 1);
    std::vector<Pending> pending;
    for (uint32_t rank = 0; rank < kRanks; ++rank) pending.push_back(ranks.post(rank, job.operation(rank)));
    std::this_thread::sleep_for(50ms);
    ranks.engine(1).abort(ranks.group(1), "enough");
    for (const Pending& entry : pending) EXPECT_TRUE(has(entry.wait(), "enough"));
  }
  std::this_thread::sleep_for(100ms);
}

TEST(Spreads, ADeadlineNamesWhoHasNotCalled) {
  Ranks ranks(kRanks, {.timeout = 500ms});
  ranks.spread_by_multicast();
  const Job job(multicast_broadcast(1), Kind::kBroadcast, kRanks, 100000, 1);
  std::vector<Pending> pending;
  for (uint32_t rank = 0; rank + 1 < kRanks; ++rank) pending.push_back(ranks.post(rank, job.operation(rank)));
  for (const Pending& entry : pending) {
    const std::string error = entry.wait();
    EXPECT_TRUE(has(error, "rank 3 (host3) has not called it")) << error;
  }
}

}  // namespace
}  // namespace paceline::testing
