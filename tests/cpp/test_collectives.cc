// Engines of several ranks in one process, over TCP and on one host, run small schedules.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "ranks.h"

namespace paceline::testing {
namespace {

using namespace std::chrono_literals;

class Transports : public ::testing::TestWithParam<bool> {
 protected:
  RankOptions options() const { return {GetParam(), 60s}; }
};

INSTANTIATE_TEST_SUITE_P(Core, Transports, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "shm" : "tcp"; });

void run(Ranks& ranks, const Job& job, size_t group = 0) {
  std::vector<Pending> pending;
  for (uint32_t rank = 0; rank < ranks.size(); ++rank) pending.push_back(ranks.post(rank, job.operation(rank), group));
  for (Pending& entry : pending) ASSERT_EQ(entry.wait(), "");
  ASSERT_TRUE(job.right());
}

// Counts of int32 whose bytes lie around the limits of a frame: inline 8 KB, slice 128 KB, acknowledged 512 KB.
std::vector<uint64_t> counts(uint32_t num_chunks) {
  std::vector<uint64_t> counts = {0, 1, 2, 3, 5, 17, 1000};
  for (const uint64_t bytes : {8u << 10, 128u << 10, 512u << 10, 1536u << 10}) {
    for (const int more : {-1, 0, 1}) counts.push_back(static_cast<uint64_t>(num_chunks * bytes / 4 + more));
  }
  return counts;
}

TEST_P(Transports, SwapOfTwo) {
  Ranks ranks(2, options());
  for (const uint64_t count : counts(1)) run(ranks, {swap_all_reduce(), Kind::kAllReduce, 2, count, 1});
}

TEST_P(Transports, RingOfThreeAndFour) {
  for (const uint32_t n : {3u, 4u}) {
    Ranks ranks(n, options());
    for (const uint64_t count : counts(n)) run(ranks, {ring_all_reduce(n), Kind::kAllReduce, n, count, 2});
  }
}

TEST_P(Transports, DirectAllReduceOfFour) {
  Ranks ranks(4, options());
  for (const uint64_t count : counts(2)) run(ranks, {direct_all_reduce(4), Kind::kAllReduce, 4, count, 3});
}

TEST_P(Transports, ChainBroadcast) {
  Ranks ranks(4, options());
  for (const uint64_t count : counts(3)) run(ranks, {chain_broadcast(4, 3), Kind::kBroadcast, 4, count, 4});
}

TEST_P(Transports, AProgramWithoutTransfersIsDoneAtOnce) {
  Ranks ranks(2, options());
  run(ranks, {Schedule{"nothing", 1, {}}, Kind::kAllReduce, 2, 0, 1});
}

// Many at once on several groups, posted by each rank from a thread of its own and at its own pace: some ranks are
// far ahead of others, so that frames of collectives not called yet arrive in all sizes.
TEST_P(Transports, ManyInFlightOnSeveralGroups) {
  constexpr uint32_t kRanks = 3;
  constexpr size_t kGroups = 3, kJobs = 24;
  Ranks ranks(kRanks, options());
  while (ranks.add_group() + 1 < kGroups) {
  }
  std::mt19937 random(7);
  std::vector<std::vector<std::unique_ptr<Job>>> jobs(kGroups);
  for (auto& list : jobs) {
    for (size_t i = 0; i < kJobs; ++i) {
      const uint64_t sizes[] = {1, 700, 2048, 6200, 30000, 100000};
      const uint64_t count = sizes[random() % std::size(sizes)] + random() % 3;
      const bool all_reduce = random() % 3 != 0;
      const Schedule schedule = !all_reduce         ? chain_broadcast(kRanks, 2)
                                : random() % 2 == 0 ? ring_all_reduce(kRanks)
                                                    : direct_all_reduce(kRanks);
      const Kind kind = all_reduce ? Kind::kAllReduce : Kind::kBroadcast;
      list.push_back(std::make_unique<Job>(schedule, kind, kRanks, count, static_cast<uint32_t>(i)));
    }
  }
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    for (size_t group = 0; group < kGroups; ++group) {
      threads.emplace_back([&, rank, group] {
        std::mt19937 pace(rank * 10 + static_cast<uint32_t>(group));
        std::vector<Pending> pending;
        for (const auto& job : jobs[group]) {
          pending.push_back(ranks.post(rank, job->operation(rank), group));
          if (pace() % 4 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(pace() % 8));
          if (pace() % 6 == 0) pending.back().wait();
        }
        for (Pending& entry : pending) {
          if (!entry.wait().empty()) ++failures;
        }
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failures, 0);
  for (const auto& list : jobs) {
    for (const auto& job : list) EXPECT_TRUE(job->right());
  }
}

// Callers that wait do the progress thread's work; several at once, with and without polling, and with others let by.
TEST_P(Transports, WaitingCallersHelp) {
  constexpr uint32_t kRanks = 3;
  Ranks ranks(kRanks, options());
  for (const std::chrono::microseconds polls : {0us, 50us}) {
    std::vector<std::unique_ptr<Job>> jobs;
    for (uint32_t i = 0; i < 30; ++i) {
      jobs.push_back(std::make_unique<Job>(ring_all_reduce(kRanks), Kind::kAllReduce, kRanks, i * 3001, i));
    }
    std::vector<std::thread> threads;
    std::atomic<int> failures{0};
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, rank] {
        for (const auto& job : jobs) {
          const auto operation = job->operation(rank);
          std::atomic<bool> done{false};
          operation->timeout = 60s;
          operation->on_done = [&](const std::string& error) {
            if (!error.empty()) ++failures;
            done = true;
          };
          ranks.engine(rank).post(ranks.group(rank), operation, false);
          const auto until = Clock::now() + 60s;
          while (!done && Clock::now() < until) ranks.engine(rank).help(done, until, {polls, -1});
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    ASSERT_EQ(failures, 0);
    for (const auto& job : jobs) ASSERT_TRUE(job->right());
  }
}

// Who is said to wait puts off waking the others; where he does not come to wait, they are woken all the same.
TEST_P(Transports, WhoDoesNotComeToWaitHoldsNobodyUp) {
  constexpr uint32_t kRanks = 3;
  Ranks ranks(kRanks, options());
  for (uint32_t later = 0; later < 1u << kRanks; ++later) {
    const Job job(ring_all_reduce(kRanks), Kind::kAllReduce, kRanks, 500, later);
    std::vector<Pending> pending;
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      std::this_thread::sleep_for(3ms);  // the engines sleep
      pending.push_back(ranks.post(rank, job.operation(rank), 0, (later >> rank) % 2 == 1));
    }
    for (Pending& entry : pending) ASSERT_EQ(entry.wait(), "");
    ASSERT_TRUE(job.right());
  }
}

// A late rank holds nobody up who does not need it, and finds everything there when it comes.
TEST_P(Transports, ALateRankFindsWhatCameBefore) {
  Ranks ranks(2, options());
  std::vector<std::unique_ptr<Job>> jobs;
  std::vector<Pending> pending;
  for (uint32_t i = 0; i < 40; ++i) {
    const uint64_t count = i % 4 == 0 ? 60000 : 100 * i;
    jobs.push_back(std::make_unique<Job>(chain_broadcast(2, 2), Kind::kBroadcast, 2, count, i));
    pending.push_back(ranks.post(0, jobs.back()->operation(0)));
  }
  std::this_thread::sleep_for(50ms);
  for (const auto& job : jobs) pending.push_back(ranks.post(1, job->operation(1)));
  for (Pending& entry : pending) ASSERT_EQ(entry.wait(), "");
  for (const auto& job : jobs) EXPECT_TRUE(job->right());
}

// Rank 0 has all its chunks ready, may send only those of the first rounds until it hears of rank 1, and must go on
// then.
TEST_P(Transports, WhoWaitsForItsRoundGoesOn) {
  Ranks ranks(2, options());
  for (const uint64_t count : counts(40)) {
    const Job job(swap_in_rounds(40), Kind::kAllReduce, 2, count, 5);
    const Pending ahead = ranks.post(0, job.operation(0));
    std::this_thread::sleep_for(2ms);
    const Pending late = ranks.post(1, job.operation(1));
    ASSERT_EQ(ahead.wait(), "");
    ASSERT_EQ(late.wait(), "");
    ASSERT_TRUE(job.right());
  }
}

// Rank 0 awaits rank 2 in two collectives, so a third one that goes in turn is not sent to rank 1, which needs nobody
// else for it, until one of the two has ended. Memory has no ports to share, and holds nothing back.
TEST_P(Transports, WhatGoesInTurnWaitsForWhatWasCalledBefore) {
  Ranks ranks(3, options());
  run(ranks, {ring_all_reduce(3), Kind::kAllReduce, 3, 3, 1});  // all are connected
  const Schedule from_last{"from last", 1, {{0, 2, 0, 0, 1, false}}, false, true};
  const Schedule to_next{"to next", 1, {{0, 0, 1, 0, 1, false}}, false, true};
  const Job first(from_last, Kind::kBroadcast, 3, 100, 1), second(from_last, Kind::kBroadcast, 3, 100, 2);
  const Job third(to_next, Kind::kBroadcast, 3, 100, 3);
  std::vector<Pending> others;
  for (const Job* job : {&first, &second}) {
    for (const uint32_t rank : {0u, 1u}) others.push_back(ranks.post(rank, job->operation(rank)));
  }
  others.push_back(ranks.post(0, third.operation(0)));
  const Pending received = ranks.post(1, third.operation(1));
  std::this_thread::sleep_for(50ms);
  EXPECT_EQ(received.ready(), options().shm);
  others.push_back(ranks.post(2, first.operation(2)));
  EXPECT_EQ(received.wait(), "");
  others.push_back(ranks.post(2, second.operation(2)));
  others.push_back(ranks.post(2, third.operation(2)));
  for (const Pending& entry : others) EXPECT_EQ(entry.wait(), "");
}

// A rank that has done its part may leave at once; the others still finish. Rank 2 comes late, so that rank 1 has what
// rank 0 sent, and cannot write it before rank 2 has read what was there.
TEST_P(Transports, ARankMayLeaveWhenItsPartIsDone) {
  const Schedule schedule{"relay", 1, {{0, 1, 2, 0, 1, false}, {0, 0, 1, 0, 1, false}}};
  for (const uint64_t count : {10u, 1000u, 20000u, 300000u}) {
    Ranks ranks(3, options());
    run(ranks, {ring_all_reduce(3), Kind::kAllReduce, 3, 3, 1});  // all are connected
    const Job job(schedule, Kind::kBroadcast, 3, count, 5);
    Pending first = ranks.post(0, job.operation(0));
    Pending second = ranks.post(1, job.operation(1));
    // Small transfers fit into the ring or the kernel's buffers.
    if (first.wait(2s).empty()) {
      ranks.leave(0);
      std::this_thread::sleep_for(20ms);
    }
    Pending third = ranks.post(2, job.operation(2));
    EXPECT_EQ(second.wait(), "") << count;
    EXPECT_EQ(third.wait(), "") << count;
  }
}

TEST_P(Transports, OpenedFromBothSidesAtOnce) {
  for (int round = 0; round < 10; ++round) {
    Ranks ranks(4, options());
    const Job job(direct_all_reduce(4), Kind::kAllReduce, 4, 10, 1);
    std::vector<std::thread> threads;
    std::atomic<int> failures{0};
    for (uint32_t rank = 0; rank < 4; ++rank) {
      threads.emplace_back([&, rank] {
        if (!ranks.post(rank, job.operation(rank)).wait().empty()) ++failures;
      });
    }
    for (std::thread& thread : threads) thread.join();
    ASSERT_EQ(failures, 0);
    ASSERT_TRUE(job.right());
  }
}

TEST(Engines, ComeAndGoWithoutEverJoining) {
  for (int i = 0; i < 20; ++i) {
    const Engine engine({"lo", i % 2 == 0});
    EXPECT_FALSE(engine.address().tcp.empty());
    EXPECT_EQ(engine.address().shm.empty(), i % 2 != 0);
  }
}

}  // namespace
}  // namespace paceline::testing
