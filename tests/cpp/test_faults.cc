// What a group does when something goes wrong: everybody hears of it, and nothing hangs.
#include <gtest/gtest.h>

#include <thread>

#include "ranks.h"

namespace paceline::testing {
namespace {

using namespace std::chrono_literals;

class Faults : public ::testing::TestWithParam<bool> {
 protected:
  RankOptions options() const { return {GetParam(), 30s}; }
};

INSTANTIATE_TEST_SUITE_P(Core, Faults, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "shm" : "tcp"; });

TEST_P(Faults, AbortEndsEverythingEverywhere) {
  Ranks ranks(3, options());
  std::vector<std::unique_ptr<Job>> jobs;
  std::vector<Pending> pending;
  for (uint32_t i = 0; i < 10; ++i) {
    jobs.push_back(std::make_unique<Job>(ring_all_reduce(3), Kind::kAllReduce, 3, 50000 * i, i));
    for (const uint32_t rank : {0u, 1u}) pending.push_back(ranks.post(rank, jobs.back()->operation(rank)));
  }
  std::vector<uint8_t> in(10), out(100000);
  pending.push_back(ranks.receive(0, 2, 1, in));
  pending.push_back(ranks.send(1, 2, 1, out));
  std::this_thread::sleep_for(20ms);
  ranks.engine(1).abort(ranks.group(1), "enough");
  for (Pending& entry : pending) EXPECT_TRUE(has(entry.wait(), "enough")) << entry.wait();
  EXPECT_TRUE(has(ranks.engine(1).failure(ranks.group(1)), "enough"));
  const Job late(ring_all_reduce(3), Kind::kAllReduce, 3, 10, 1);
  EXPECT_TRUE(has(ranks.post(0, late.operation(0)).wait(), "enough"));
}

// Buffers may be freed as soon as their operation has ended, however it ended.
TEST_P(Faults, BuffersAreNotTouchedAfterTheEnd) {
  for (int round = 0; round < 15; ++round) {
    Ranks ranks(3, options());
    auto job = std::make_unique<Job>(direct_all_reduce(3), Kind::kAllReduce, 3, 400000, 1);
    std::vector<uint8_t> in(300000), out(300000);
    std::vector<Pending> pending;
    for (uint32_t rank = 0; rank < 3; ++rank) pending.push_back(ranks.post(rank, job->operation(rank)));
    pending.push_back(ranks.send(0, 1, 0, out));
    pending.push_back(ranks.receive(1, 0, 0, in));
    std::this_thread::sleep_for(std::chrono::microseconds(100 * round));
    ranks.engine(round % 3).abort(ranks.group(round % 3), "enough");
    for (Pending& entry : pending) entry.wait();
    job.reset();
    in = {};
    out = {};
    std::this_thread::sleep_for(5ms);
  }
}

TEST_P(Faults, LeavingWhileOthersWait) {
  Ranks ranks(3, options());
  const Job job(ring_all_reduce(3), Kind::kAllReduce, 3, 1000, 1);
  std::vector<Pending> pending;
  for (uint32_t rank = 0; rank < 3; ++rank) pending.push_back(ranks.post(rank, job.operation(rank)));
  for (Pending& entry : pending) ASSERT_EQ(entry.wait(), "");
  const Job next(ring_all_reduce(3), Kind::kAllReduce, 3, 100000, 2);
  Pending first = ranks.post(0, next.operation(0)), second = ranks.post(1, next.operation(1));
  ranks.leave(2);
  EXPECT_TRUE(has(first.wait(), "rank 2 (host2) has left the group")) << first.wait();
  EXPECT_TRUE(has(second.wait(), "rank 2 (host2) has left the group")) << second.wait();
}

TEST_P(Faults, LeavingEndsOnesOwnOperations) {
  Ranks ranks(2, options());
  const Job job(swap_all_reduce(), Kind::kAllReduce, 2, 1000, 1);
  Pending pending = ranks.post(0, job.operation(0));
  std::vector<uint8_t> in(5);
  Pending received = ranks.receive(0, 1, 0, in);
  ranks.leave(0);
  EXPECT_TRUE(has(pending.wait(), "was destroyed by this rank"));
  EXPECT_TRUE(has(received.wait(), "was destroyed by this rank"));
}

TEST_P(Faults, DifferentCallsAreNamedOnBothSides) {
  Ranks ranks(2, options());
  const Job a(swap_all_reduce(), Kind::kAllReduce, 2, 1000, 1), b(swap_all_reduce(), Kind::kAllReduce, 2, 2000, 1);
  Pending first = ranks.post(0, a.operation(0)), second = ranks.post(1, b.operation(1));
  for (Pending* entry : {&first, &second}) {
    EXPECT_TRUE(has(entry->wait(), "allreduce(int32[1000], sum)")) << entry->wait();
    EXPECT_TRUE(has(entry->wait(), "allreduce(int32[2000], sum)")) << entry->wait();
  }
}

// A root that only sends is done before anybody has looked at what it sent. It hears at its next call, or when it
// leaves.
TEST_P(Faults, ARootThatIsDoneHearsOfDifferentCalls) {
  const auto names_both = [](const std::string& text) {
    return has(text, "broadcast(int32[100], root 0)") && has(text, "allreduce(int32[100], sum)") && has(text, "rank 1");
  };
  for (const bool calls_again : {false, true}) {
    Ranks ranks(3, options());
    const Job broadcast(chain_broadcast(3, 1), Kind::kBroadcast, 3, 100, 1);
    const Job other(ring_all_reduce(3), Kind::kAllReduce, 3, 100, 1);
    EXPECT_EQ(ranks.post(0, broadcast.operation(0)).wait(), "");
    const Pending right = ranks.post(2, broadcast.operation(2)), wrong = ranks.post(1, other.operation(1));
    EXPECT_TRUE(names_both(right.wait())) << right.wait();
    EXPECT_TRUE(names_both(wrong.wait())) << wrong.wait();
    for (int i = 0; i < 10000 && !ranks.group(0)->disputes(1); ++i) std::this_thread::sleep_for(1ms);
    EXPECT_TRUE(ranks.group(0)->disputes(1));
    EXPECT_FALSE(ranks.group(0)->disputes(0));
    if (calls_again) {
      const std::string said = ranks.post(0, other.operation(0)).wait();
      EXPECT_TRUE(names_both(said)) << said;
    }
    const std::string last = ranks.leave(0);
    EXPECT_EQ(names_both(last), !calls_again) << last;
    EXPECT_EQ(ranks.leave(1), "");
  }
}

TEST_P(Faults, DifferentSchedules) {
  Ranks ranks(2, options());
  const Job a(swap_all_reduce(), Kind::kAllReduce, 2, 1000, 1), b(ring_all_reduce(2), Kind::kAllReduce, 2, 1000, 1);
  Pending first = ranks.post(0, a.operation(0)), second = ranks.post(1, b.operation(1));
  EXPECT_TRUE(has(first.wait(), "by different schedules")) << first.wait();
  EXPECT_TRUE(has(second.wait(), "by different schedules")) << second.wait();
}

// Both only receive, each in a collective of its own: no frame would ever tell them.
TEST_P(Faults, RanksThatWaitForEachOtherFindOut) {
  Ranks ranks(2, options());
  const Schedule to_zero{"to zero", 1, {{0, 1, 0, 0, 1, false}}}, to_one{"to one", 1, {{0, 0, 1, 0, 1, false}}};
  const Job a(to_zero, Kind::kBroadcast, 2, 10, 1), b(to_one, Kind::kBroadcast, 2, 11, 1);
  Pending first = ranks.post(0, a.operation(0)), second = ranks.post(1, b.operation(1));
  EXPECT_TRUE(has(first.wait(), "must call the same collectives")) << first.wait();
  EXPECT_TRUE(has(second.wait(), "must call the same collectives")) << second.wait();
}

TEST_P(Faults, ATimeOutNamesTheRankThatHasNotCalled) {
  RankOptions impatient = options();
  impatient.timeout = 300ms;
  Ranks ranks(3, impatient);
  const Job job(ring_all_reduce(3), Kind::kAllReduce, 3, 1000, 1);
  Pending first = ranks.post(0, job.operation(0)), second = ranks.post(1, job.operation(1));
  EXPECT_TRUE(has(first.wait(), "rank 2 (host2) has not called it")) << first.wait();
  EXPECT_TRUE(has(second.wait(), "rank 2 (host2) has not called it")) << second.wait();
}

// A message is offered; its sender leaves before anybody wants it. Wanting it then is an error, not a wait.
TEST_P(Faults, AnOfferOfARankThatIsGone) {
  Ranks ranks(2, options());
  std::vector<uint8_t> out(200000), in(200000), small(10), small_in(10);
  Pending offered = ranks.send(0, 1, 1, out);
  EXPECT_EQ(ranks.send(0, 1, 2, small).wait(), "");
  EXPECT_EQ(ranks.receive(1, 0, 2, small_in).wait(), "");  // so the offer has arrived
  ranks.leave(0);
  EXPECT_TRUE(has(offered.wait(), "was destroyed by this rank"));
  std::this_thread::sleep_for(20ms);
  const std::string error = ranks.receive(1, 0, 1, in).wait(10s);
  EXPECT_TRUE(has(error, "rank 0 (host0)") && has(error, "has left the group")) << error;
}

TEST_P(Faults, GroupsFailAlone) {
  Ranks ranks(2, options());
  const size_t other = ranks.add_group();
  ranks.engine(0).abort(ranks.group(0), "enough");
  const Job job(swap_all_reduce(), Kind::kAllReduce, 2, 100000, 1);
  Pending first = ranks.post(0, job.operation(0), other), second = ranks.post(1, job.operation(1), other);
  EXPECT_EQ(first.wait(), "");
  EXPECT_EQ(second.wait(), "");
  EXPECT_TRUE(job.right());
}

// A rank that has left because another died lets nobody in any more. The one who died is named all the same.
TEST_P(Faults, ARankThatLeftBecauseAnotherDied) {
  Ranks ranks(3, options());
  const Schedule star{"star", 1, {{0, 0, 1, 0, 1, false}, {0, 0, 2, 0, 1, false}}};
  const Schedule across{"across", 1, {{0, 2, 1, 0, 1, false}}};
  const Job first(star, Kind::kBroadcast, 3, 10, 1), second(star, Kind::kBroadcast, 3, 10, 2);
  std::vector<Pending> pending;
  for (uint32_t rank = 0; rank < 3; ++rank) pending.push_back(ranks.post(rank, first.operation(rank)));
  for (const Pending& entry : pending) ASSERT_EQ(entry.wait(), "");
  ranks.kill(0);
  const std::string heard = ranks.post(2, second.operation(2)).wait();
  EXPECT_TRUE(has(heard, "rank 0 (host0) closed its connection: its process died")) << heard;
  ranks.leave(2);
  const Job third(across, Kind::kBroadcast, 3, 10, 3);
  const std::string error = ranks.post(1, third.operation(1)).wait();
  EXPECT_TRUE(has(error, "rank 2 (host2) closed its connection while being introduced")) << error;
  EXPECT_TRUE(has(error, "before, rank 0 (host0) closed its connection: its process died")) << error;
}

// Nobody listens at a rank's address any more.
TEST_P(Faults, AProcessThatDiedBeforeItWasNeeded) {
  Engine alive({"lo", GetParam()});
  Membership member = membership(0, 2);
  PeerAddress dead;
  {
    const Engine engine({"lo", GetParam()});
    dead = engine.address();
  }
  dead.host = "ghost";
  const std::shared_ptr<Group> group = alive.join(member);
  alive.introduce(group, {alive.address(), dead});
  const Job job(swap_all_reduce(), Kind::kAllReduce, 2, 1000, 1);
  const auto operation = job.operation(0);
  std::promise<std::string> promise;
  operation->timeout = 30s;
  operation->on_done = [&](const std::string& error) { promise.set_value(error); };
  alive.post(group, operation, true);
  const std::string error = Pending(promise.get_future()).wait();
  EXPECT_TRUE(has(error, "rank 1 (ghost) refused the connection: its process died")) << error;
  alive.leave(group);
}

// A rank that has always something to read still looks at its deadlines.
TEST_P(Faults, DeadlinesAreKeptBesideAFlood) {
  Ranks ranks(4, options());
  const size_t other = ranks.add_group();
  std::atomic<bool> enough{false};
  std::vector<std::thread> floods;
  for (const uint32_t from : {1u, 2u, 3u}) {
    floods.emplace_back([&, from] {
      std::vector<uint8_t> out(1 << 20), in(1 << 20);
      while (!enough) {
        const Pending received = ranks.receive(0, from, from, in), sent = ranks.send(from, 0, from, out);
        EXPECT_EQ(received.wait() + sent.wait(), "");
      }
    });
  }
  const Job job(ring_all_reduce(4), Kind::kAllReduce, 4, 1000, 1);
  const auto operation = job.operation(0);
  std::promise<std::string> ended;
  operation->timeout = 50ms;
  operation->on_done = [&ended](const std::string& error) { ended.set_value(error); };
  ranks.engine(0).post(ranks.group(0, other), operation, true);
  const Pending pending(ended.get_future());
  EXPECT_TRUE(has(pending.wait(10s), "Timed out")) << pending.wait();
  enough = true;
  for (std::thread& flood : floods) flood.join();
}

// Results are made final in slices: others get in between, even if it never ends.
TEST_P(Faults, AResultThatTakesLongKeepsNobodyWaiting) {
  Ranks ranks(2, options());
  const size_t other = ranks.add_group();
  std::atomic<bool> enough{false};
  const Job slow(swap_all_reduce(), Kind::kAllReduce, 2, 1000, 1), quick(swap_all_reduce(), Kind::kAllReduce, 2, 10, 2);
  std::vector<Pending> pending;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    const auto operation = slow.operation(rank);
    operation->epilogue = [&enough] { return !enough; };
    pending.push_back(ranks.post(rank, operation));
  }
  std::this_thread::sleep_for(20ms);
  for (int round = 0; round < 50; ++round) {
    for (uint32_t rank = 0; rank < 2; ++rank) pending.push_back(ranks.post(rank, quick.operation(rank), other));
    for (uint32_t rank = 0; rank < 2; ++rank) EXPECT_EQ(pending[pending.size() - 1 - rank].wait(10s), "");
  }
  EXPECT_FALSE(pending[0].ready());
  enough = true;
  for (const Pending& entry : pending) EXPECT_EQ(entry.wait(10s), "");
}

// A rank may leave when its part is done: what it sent is there, however late the others call for it.
TEST_P(Faults, WhatALateRankFindsIsWholeThoughItsSenderHasLeft) {
  Ranks ranks(2, options());
  const Job first(swap_all_reduce(), Kind::kAllReduce, 2, 10, 1);
  const Pending met = ranks.post(0, first.operation(0)), meets = ranks.post(1, first.operation(1));
  ASSERT_EQ(met.wait() + meets.wait(), "");
  const uint64_t count = GetParam() ? 2000 : 1'000'000;  // of which memory keeps as much, or the kernel and the engine
  const Job job(chain_broadcast(2, 4), Kind::kBroadcast, 2, count, 2);
  EXPECT_EQ(ranks.post(0, job.operation(0)).wait(), "");
  ranks.leave(0);
  EXPECT_EQ(ranks.post(1, job.operation(1)).wait(), "");
  EXPECT_TRUE(job.right());
}

}  // namespace
}  // namespace paceline::testing
