// Some of a group's ranks do something together: any of them, in any order, while others come, fail and go.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <thread>

#include "ranks.h"

namespace paceline::testing {
namespace {

using namespace std::chrono_literals;

class InTeams : public ::testing::TestWithParam<bool> {
 protected:
  RankOptions options(std::chrono::milliseconds timeout = 60s) const { return {GetParam(), timeout}; }
};

INSTANTIATE_TEST_SUITE_P(Core, InTeams, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "shm" : "tcp"; });

using Members = std::vector<uint32_t>;

// An all-reduce of some ranks.
struct TeamJob {
  TeamJob(uint64_t number, Members members, uint64_t count)
      : number(kFirstOfTeams + number),
        members(std::move(members)),
        job(schedule(size()), Kind::kAllReduce, size(), count, static_cast<uint32_t>(number)) {}

  static Schedule schedule(uint32_t size) {
    if (size == 1) return {"nothing", 1, {}};
    return size == 2 ? swap_all_reduce() : ring_all_reduce(size);
  }

  uint32_t size() const { return static_cast<uint32_t>(members.size()); }
  Pending post(Ranks& ranks, uint32_t rank) const {
    const auto index = static_cast<uint32_t>(std::find(members.begin(), members.end(), rank) - members.begin());
    const auto operation = job.operation(index);
    operation->number = number;
    operation->program = operation->program->among(members);
    return ranks.post(rank, operation);
  }
  void run(Ranks& ranks) const {
    std::vector<Pending> pending;
    for (const uint32_t rank : members) pending.push_back(post(ranks, rank));
    for (Pending& entry : pending) ASSERT_EQ(entry.wait(), "");
    ASSERT_TRUE(job.right());
  }

  uint64_t number;
  Members members;
  Job job;
};

Members some_of(uint32_t num_ranks, std::mt19937& random) {
  Members members(num_ranks);
  std::iota(members.begin(), members.end(), 0);
  std::shuffle(members.begin(), members.end(), random);
  members.resize(2 + random() % (num_ranks - 1));
  return members;
}

TEST_P(InTeams, AnyRanksInAnyOrder) {
  constexpr uint32_t kRanks = 5;
  Ranks ranks(kRanks, options());
  std::mt19937 random(7);
  std::vector<std::unique_ptr<TeamJob>> jobs;
  for (uint32_t i = 1; i <= 120; ++i) {
    const uint64_t count = i % 5 == 0 ? 100000 : 37 * i;
    jobs.push_back(std::make_unique<TeamJob>(i, some_of(kRanks, random), count));
  }
  const Job of_all(ring_all_reduce(kRanks), Kind::kAllReduce, kRanks, 50000, 3);
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      std::mt19937 pace(rank);
      std::vector<TeamJob*> mine;
      for (const auto& job : jobs) {
        if (std::count(job->members.begin(), job->members.end(), rank) > 0) mine.push_back(job.get());
      }
      std::shuffle(mine.begin(), mine.end(), pace);
      std::vector<Pending> pending;
      pending.push_back(ranks.post(rank, of_all.operation(rank)));
      for (TeamJob* job : mine) {
        pending.push_back(job->post(ranks, rank));
        if (pace() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(pace() % 3000));
      }
      for (Pending& entry : pending) {
        if (!entry.wait().empty()) ++failures;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failures, 0);
  EXPECT_TRUE(of_all.right());
  for (const auto& job : jobs) EXPECT_TRUE(job->job.right());
}

TEST_P(InTeams, OneMemberIsDoneAtOnce) {
  Ranks ranks(2, options());
  TeamJob(1, {1}, 1000).run(ranks);
}

TEST_P(InTeams, OnlyTeamsThatNeedALostRankEnd) {
  Ranks ranks(4, options());
  TeamJob(1, {0, 1, 2, 3}, 1000).run(ranks);
  const TeamJob lost(2, {0, 1, 2, 3}, 100000), other(3, {0, 2}, 100000);
  std::vector<Pending> pending;
  for (const uint32_t rank : {0, 1, 2}) pending.push_back(lost.post(ranks, rank));
  Pending alive = other.post(ranks, 0);
  ranks.kill(3);
  for (Pending& entry : pending) EXPECT_TRUE(has(entry.wait(), "rank 3 (host3)")) << entry.wait();
  EXPECT_EQ(other.post(ranks, 2).wait(), "");
  EXPECT_EQ(alive.wait(), "");
  EXPECT_TRUE(other.job.right());
  TeamJob(4, {2, 1, 0}, 5000).run(ranks);
  EXPECT_TRUE(has(TeamJob(5, {1, 3}, 10).post(ranks, 1).wait(), "rank 3 (host3)"));
  for (const uint32_t rank : {0, 1, 2}) EXPECT_EQ(ranks.engine(rank).failure(ranks.group(rank)), "");
}

// Also where the rank that was lost never had a connection to the one that calls.
TEST_P(InTeams, ARankThatWasNeverMetIsMissed) {
  Ranks ranks(3, options());
  ranks.kill(2);
  EXPECT_TRUE(has(TeamJob(1, {0, 2}, 10).post(ranks, 0).wait(), "rank 2 (host2)"));
  TeamJob(2, {0, 1}, 10).run(ranks);
}

TEST_P(InTeams, WhoGivesUpTellsAll) {
  for (const bool met : {false, true}) {
    Ranks ranks(4, options());
    if (met) TeamJob(1, {0, 1, 2, 3}, 1000).run(ranks);
    const TeamJob job(2, {0, 1, 2, 3}, 100000);
    std::vector<Pending> pending;
    for (const uint32_t rank : {0, 2, 3}) pending.push_back(job.post(ranks, rank));
    ranks.engine(1).give_up(ranks.group(1), job.number, "enough");
    pending.push_back(job.post(ranks, 1));
    for (Pending& entry : pending) EXPECT_TRUE(has(entry.wait(), "enough")) << entry.wait();
    TeamJob(3, {3, 2, 1, 0}, 100000).run(ranks);
  }
}

TEST_P(InTeams, ALateMemberIsNamed) {
  Ranks ranks(4, options(300ms));
  const TeamJob job(1, {0, 1, 2, 3}, 1000);
  std::vector<Pending> pending;
  for (const uint32_t rank : {0, 1, 3}) pending.push_back(job.post(ranks, rank));
  for (Pending& entry : pending) EXPECT_TRUE(has(entry.wait(), "rank 2 (host2) did not call it")) << entry.wait();
  EXPECT_TRUE(has(job.post(ranks, 2).wait(), "rank 2 (host2) did not call it"));
  TeamJob(2, {0, 1, 2, 3}, 1000).run(ranks);
}

TEST_P(InTeams, WhatDoesNotFitEndsTheTeamOnly) {
  Ranks ranks(2, options());
  const TeamJob small(1, {0, 1}, 1000), large(1, {0, 1}, 2000);
  const Pending first = small.post(ranks, 0), second = large.post(ranks, 1);
  EXPECT_TRUE(has(first.wait(), "int32[1000]")) << first.wait();
  EXPECT_TRUE(has(second.wait(), "int32[2000]")) << second.wait();
  TeamJob(2, {0, 1}, 1000).run(ranks);
}

TEST_P(InTeams, ANumberIsUsedOnce) {
  Ranks ranks(2, options());
  const TeamJob job(1, {0, 1}, 10);
  job.run(ranks);
  EXPECT_TRUE(has(job.post(ranks, 0).wait(), "has used this number before")) << job.post(ranks, 0).wait();
}

// Buffers may be freed as soon as their operation has ended, however it ended, and the connections go on.
TEST_P(InTeams, BuffersAreNotTouchedAfterTheEnd) {
  Ranks ranks(3, options());
  for (uint32_t round = 1; round <= 30; ++round) {
    auto job = std::make_unique<TeamJob>(2 * round, Members{0, 1, 2}, 400000);
    std::vector<Pending> pending;
    for (uint32_t rank = 0; rank < 3; ++rank) pending.push_back(job->post(ranks, rank));
    std::this_thread::sleep_for(std::chrono::microseconds(100 * (round % 15)));
    ranks.engine(round % 3).give_up(ranks.group(round % 3), job->number, "enough");
    for (Pending& entry : pending) entry.wait();
    job.reset();
    TeamJob(2 * round + 1, {2, 0, 1}, 30000).run(ranks);
  }
}

// Workers come and go: one that was lost may come back as a new process in its old place.
TEST_P(InTeams, WhoWasLostComesBack) {
  Ranks ranks(4, options());
  for (uint32_t round = 0; round < 6; ++round) {
    const uint32_t lost = 1 + round % 3;
    TeamJob(10 * round + 1, {0, 1, 2, 3}, 5000).run(ranks);
    const TeamJob interrupted(10 * round + 2, {0, lost}, 3000000);
    const Pending pending = interrupted.post(ranks, 0);
    if (round % 2 == 0) interrupted.post(ranks, lost);
    ranks.kill(lost);
    const std::string error = pending.wait();
    const bool in_time = round % 2 == 0 && error.empty();  // it was called by both, and done before the end
    EXPECT_TRUE(in_time || has(error, "rank " + std::to_string(lost))) << error;
    Members others{0, 1, 2, 3};
    std::erase(others, lost);
    TeamJob(10 * round + 3, others, 5000).run(ranks);
    ranks.revive(lost);
    TeamJob(10 * round + 4, {lost, 0}, 5000).run(ranks);
  }
}

TEST_P(InTeams, TheGroupsEndIsTheirs) {
  Ranks ranks(3, options());
  const TeamJob job(1, {0, 1, 2}, 1000);
  const Pending first = job.post(ranks, 0), second = job.post(ranks, 1);
  ranks.engine(1).abort(ranks.group(1), "enough");
  EXPECT_TRUE(has(second.wait(), "enough")) << second.wait();
  EXPECT_TRUE(has(first.wait(), "enough")) << first.wait();
  EXPECT_TRUE(has(job.post(ranks, 2).wait(), "enough"));
}

}  // namespace
}  // namespace paceline::testing
