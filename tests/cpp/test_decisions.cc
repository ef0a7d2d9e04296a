// Collectives that await a decision: one coordinator, late members, and members that say what makes no sense.
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <thread>

#include "impostor.h"
#include "ranks.h"

namespace paceline::testing {
namespace {

using namespace std::chrono_literals;

// Two schedules of the same all-reduce: the empty choice runs one, any other the other.
class Question {
 public:
  Question(uint32_t num_ranks, uint64_t count, uint32_t seed)
      : plain_(ring_all_reduce(num_ranks), Kind::kAllReduce, num_ranks, count, seed), num_ranks_(num_ranks) {}

  // Remembers what was chosen; `slow`: the program is never in the book.
  std::shared_ptr<Operation> operation(uint32_t rank, bool slow = false) {
    const std::shared_ptr<Operation> operation = plain_.operation(rank);
    const Prepared ring{operation->program, operation->places};
    operation->program = nullptr;
    operation->places.clear();
    operation->prepare = [this, ring, slow, rank](const std::string& choice, bool may_wait) -> std::optional<Prepared> {
      if (slow && !may_wait) return std::nullopt;
      if (choice == "nonsense") throw std::invalid_argument("nobody knows it");
      const std::lock_guard lock(mutex_);
      choices_[rank] = choice;
      Prepared prepared = ring;
      if (!choice.empty()) {  // the same rounds by another name: another digest
        Schedule named = ring_all_reduce(num_ranks_);
        named.name = "late " + choice;
        prepared.program = named.program(rank, num_ranks_);
      }
      return prepared;
    };
    return operation;
  }

  bool right() const { return plain_.right(); }
  // What all ranks took, if they took the same.
  std::string choice() {
    const std::lock_guard lock(mutex_);
    for (const auto& [rank, choice] : choices_) {
      if (choice != choices_.begin()->second) return "the ranks disagree";
    }
    return choices_.size() == num_ranks_ ? choices_.begin()->second : "not all have chosen";
  }

 private:
  Job plain_;
  uint32_t num_ranks_;
  std::mutex mutex_;
  std::map<uint32_t, std::string> choices_;
};

Decisions::Rules rules(std::chrono::duration<double> patience = 1h, uint32_t most_missing = 1) {
  Decisions::Rules rules;
  rules.enabled = true;
  rules.least_patience = patience;
  rules.most_missing = most_missing;
  rules.elsewhere = [](std::function<void()> task) { std::thread(std::move(task)).detach(); };
  return rules;
}

class Decided : public ::testing::TestWithParam<bool> {
 protected:
  void start(uint32_t size, const Decisions::Rules& by) {
    ranks_ = std::make_unique<Ranks>(size, RankOptions{GetParam(), 60s});
    for (uint32_t rank = 0; rank < size; ++rank) ranks_->engine(rank).decide_by(ranks_->group(rank), by);
  }
  Pending post(uint32_t rank, Question& question, bool slow = false) {
    return ranks_->post(rank, question.operation(rank, slow));
  }
  std::unique_ptr<Ranks> ranks_;
};

INSTANTIATE_TEST_SUITE_P(Core, Decided, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "shm" : "tcp"; });

TEST_P(Decided, WhenAllHaveComeThePlainProgramRuns) {
  start(4, rules());
  for (const bool slow : {false, true}) {
    Question question(4, 50000, 1);
    std::vector<Pending> pending;
    for (uint32_t rank = 0; rank < 4; ++rank) pending.push_back(post(rank, question, slow));
    for (const Pending& entry : pending) ASSERT_EQ(entry.wait(), "");
    EXPECT_TRUE(question.right());
    EXPECT_EQ(question.choice(), "");
  }
  const std::vector<Decisions::Record> records = ranks_->engine(0).arrivals(ranks_->group(0));
  ASSERT_EQ(records.size(), 2u);
  EXPECT_EQ(records[1].seq, 2u);
  EXPECT_EQ(records[1].bytes(), 200000u);
  EXPECT_TRUE(ranks_->engine(1).arrivals(ranks_->group(1)).empty());
}

// Whoever is missing is announced, the coordinator itself too, and it runs what the others run when it comes.
TEST_P(Decided, AMissingRankIsAnnounced) {
  start(4, rules(50ms));
  for (const uint32_t late : {3u, 0u, 1u}) {
    Question question(4, 100000, late);
    std::vector<Pending> pending;
    for (uint32_t rank = 0; rank < 4; ++rank) {
      if (rank != late) pending.push_back(post(rank, question, rank == 2));
    }
    std::this_thread::sleep_for(300ms);
    EXPECT_FALSE(pending[0].ready());
    pending.push_back(post(late, question, late == 1));
    for (const Pending& entry : pending) ASSERT_EQ(entry.wait(), "");
    EXPECT_TRUE(question.right());
    EXPECT_EQ(question.choice(), std::to_string(late));
  }
}

TEST_P(Decided, TwoMissingRanksAreAnnouncedTogether) {
  start(5, rules(50ms, 2));
  Question question(5, 10000, 1);
  std::vector<Pending> pending;
  for (const uint32_t rank : {0u, 2u, 3u}) pending.push_back(post(rank, question));
  std::this_thread::sleep_for(300ms);
  for (const uint32_t rank : {4u, 1u}) pending.push_back(post(rank, question));
  for (const Pending& entry : pending) ASSERT_EQ(entry.wait(), "");
  EXPECT_TRUE(question.right());
  EXPECT_EQ(question.choice(), "1,4");
}

// Several in flight, small ones and a barrier's order between them, ranks far ahead of others.
TEST_P(Decided, ManyInFlightBetweenOthers) {
  start(3, rules(5ms));
  std::vector<std::unique_ptr<Question>> questions;
  std::vector<std::unique_ptr<Job>> jobs;
  for (uint32_t i = 0; i < 12; ++i) {
    questions.push_back(std::make_unique<Question>(3, 1000 + 40000 * (i % 3), i));
    jobs.push_back(std::make_unique<Job>(ring_all_reduce(3), Kind::kAllReduce, 3, 100 + 30000 * (i % 2), i));
  }
  std::vector<std::vector<Pending>> pending(3);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      for (uint32_t i = 0; i < 12; ++i) {
        pending[rank].push_back(post(rank, *questions[i], i % 2 == 0));
        pending[rank].push_back(ranks_->post(rank, jobs[i]->operation(rank)));
        if (i % 3 == rank) std::this_thread::sleep_for(20ms);
        if (i % 4 == 3) {
          EXPECT_EQ(pending[rank].back().wait(), "");
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& list : pending) {
    for (const Pending& entry : list) ASSERT_EQ(entry.wait(), "");
  }
  for (uint32_t i = 0; i < 12; ++i) {
    EXPECT_TRUE(questions[i]->right());
    EXPECT_NE(questions[i]->choice(), "the ranks disagree");
    EXPECT_TRUE(jobs[i]->right());
  }
}

TEST_P(Decided, AForecastHoldsForAWindow) {
  Decisions::Rules by = rules();
  by.window = 4;
  std::atomic<int> asked{0};
  by.forecast = [&asked](const std::vector<Decisions::Record>& fresh) {
    asked += static_cast<int>(fresh.size());
    return asked < 6 ? "2:100" : "";
  };
  start(3, by);
  std::vector<std::string> choices;
  for (uint32_t i = 0; i < 20; ++i) {
    Question question(3, 3000, i);
    std::vector<Pending> pending;
    for (uint32_t rank = 0; rank < 3; ++rank) pending.push_back(post(rank, question, rank == 1));
    for (const Pending& entry : pending) ASSERT_EQ(entry.wait(), "");
    ASSERT_TRUE(question.right());
    choices.push_back(question.choice());
    while (asked <= static_cast<int>(i)) std::this_thread::sleep_for(1ms);
    std::this_thread::sleep_for(5ms);
  }
  EXPECT_EQ(choices.front(), "");
  EXPECT_EQ(choices[4], "2:100");
  EXPECT_EQ(choices.back(), "");
}

// The coordinator's own arrival may bring the next decision, by a newer forecast: its turn was decided before.
TEST_P(Decided, AForecastThatChangesIsForTurnsToCome) {
  Decisions::Rules by = rules();
  by.window = 4;
  std::atomic<int> asked{0};
  by.forecast = [&asked](const std::vector<Decisions::Record>&) { return ++asked % 2 == 0 ? "2:100" : "2:200"; };
  start(3, by);
  for (uint32_t i = 0; i < 30; ++i) {
    Question question(3, 3000, i);
    std::vector<Pending> pending;
    for (uint32_t rank = 0; rank < 3; ++rank) pending.push_back(post(rank, question));
    for (const Pending& entry : pending) ASSERT_EQ(entry.wait(), "");
    ASSERT_NE(question.choice(), "the ranks disagree");
    std::this_thread::sleep_for(2ms);  // for the next forecast
  }
}

TEST_P(Decided, AChoiceThatNobodyKnowsEndsTheGroupWithASentence) {
  Decisions::Rules by = rules();
  by.forecast = [](const std::vector<Decisions::Record>&) { return "nonsense"; };
  start(3, by);
  std::string error;
  for (uint32_t i = 0; i < 10 && error.empty(); ++i) {
    Question question(3, 100, i);
    std::vector<Pending> pending;
    for (uint32_t rank = 0; rank < 3; ++rank) pending.push_back(post(rank, question, true));
    for (const Pending& entry : pending) {
      const std::string said = entry.wait();
      if (error.empty()) error = said;
    }
    std::this_thread::sleep_for(20ms);
  }
  EXPECT_TRUE(has(error, "has no schedule for the decision \"nonsense\": nobody knows it")) << error;
}

// While one awaits, another calls something else: both calls are named.
TEST_P(Decided, AnotherCallIsNamed) {
  for (const uint32_t other : {0u, 1u, 2u}) {
    start(3, rules());
    Question first(3, 10, 1), question(3, 1000, 1);
    Job job(ring_all_reduce(3), Kind::kAllReduce, 3, 77, 1);
    std::vector<Pending> pending;
    for (uint32_t rank = 0; rank < 3; ++rank) pending.push_back(post(rank, first));
    for (const Pending& entry : pending) ASSERT_EQ(entry.wait(), "");
    pending.clear();
    for (uint32_t rank = 0; rank < 3; ++rank) {
      pending.push_back(rank == other ? ranks_->post(rank, job.operation(rank)) : post(rank, question));
    }
    for (const Pending& entry : pending) {
      const std::string said = entry.wait();
      EXPECT_TRUE(has(said, "allreduce(int32[77], sum)") && has(said, "allreduce(int32[1000], sum)")) << said;
    }
  }
}

TEST_P(Decided, ARankWithOtherSettingsIsNamed) {
  ranks_ = std::make_unique<Ranks>(3, RankOptions{GetParam(), 60s});
  for (uint32_t rank = 1; rank < 3; ++rank) ranks_->engine(rank).decide_by(ranks_->group(rank), rules());
  ranks_->engine(0).decide_by(ranks_->group(0), {});
  Question question(3, 1000, 1);
  const Pending waiting = post(1, question);
  EXPECT_TRUE(has(waiting.wait(), "rank 1 (host1) awaits a decision that rank 0 does not make: set PACELINE_LATE"));
}

TEST_P(Decided, WhoeverLeavesOrIsTooLateIsNamed) {
  for (const uint32_t gone : {0u, 2u}) {
    start(3, rules());
    Question first(3, 10, 1), question(3, 1000, 1);
    std::vector<Pending> pending;
    for (uint32_t rank = 0; rank < 3; ++rank) pending.push_back(post(rank, first));
    for (const Pending& entry : pending) ASSERT_EQ(entry.wait(), "");
    const Pending waiting = post(1, question);
    ranks_->leave(gone);
    if (gone == 2) post(0, question);
    EXPECT_TRUE(has(waiting.wait(), "rank " + std::to_string(gone) + " (host" + std::to_string(gone) + ") has left"));
  }
  ranks_ = std::make_unique<Ranks>(3, RankOptions{GetParam(), 300ms});
  for (uint32_t rank = 0; rank < 3; ++rank) ranks_->engine(rank).decide_by(ranks_->group(rank), rules());
  Question question(3, 1000, 1);
  const Pending zero = post(0, question), one = post(1, question);
  EXPECT_TRUE(has(one.wait(), "rank 2 (host2) has not called it"));
  EXPECT_TRUE(has(zero.wait(), "Timed out"));
}

// Rank `me` of two is an engine that awaits; the other is played by the test.
class Stage {
 public:
  explicit Stage(uint32_t me) : engine_({"lo", false}), member_(membership(me, 2)), question_(2, 1000, 1) {
    group_ = engine_.join(member_);
    std::vector<PeerAddress> addresses(2, {"impostor", "127.0.0.1:1", ""});
    addresses[me] = engine_.address();
    engine_.introduce(group_, addresses);
    impostor_ = std::make_unique<Impostor>(engine_, false);
    Membership other = member_;
    other.rank = 1 - me;
    EXPECT_TRUE(impostor_->introduce(other, me, Lane::kMessages));
    std::this_thread::sleep_for(20ms);
    engine_.decide_by(group_, rules());
  }
  ~Stage() { engine_.leave(group_); }

  void post() {
    operation_ = question_.operation(member_.rank);
    operation_->timeout = 20s;
    operation_->on_done = [](const std::string&) {};
    engine_.post(group_, operation_, true);
  }
  void say(FrameType type, uint64_t offset, uint64_t seq, const std::string& choice = "") {
    FrameHeader header;
    header.type = type;
    header.offset = offset;
    header.seq = seq;
    header.length = choice.size();
    header.call = {Kind::kAllReduce, DType::kInt32, ReduceOp::kSum, 0, 0, 1000, 0};
    impostor_->send(header, std::vector<uint8_t>(choice.begin(), choice.end()));
  }
  std::string fails() {
    for (int i = 0; i < 500 && engine_.failure(group_).empty(); ++i) std::this_thread::sleep_for(10ms);
    return engine_.failure(group_);
  }

 private:
  Engine engine_;
  Membership member_;
  Question question_;
  std::shared_ptr<Group> group_;
  std::unique_ptr<Impostor> impostor_;
  std::shared_ptr<Operation> operation_;
};

TEST(Hostile, DecisionsOutOfOrder) {
  const std::vector<std::pair<uint64_t, uint64_t>> turns = {{2, 2}, {0, 1}, {2, 1}, {1, 0}, {1, 1 << 20}};
  for (const auto& [first, last] : turns) {
    Stage stage(1);
    stage.post();
    stage.say(FrameType::kDecided, first, last, "3");
    EXPECT_TRUE(has(stage.fails(), "rank 0 (impostor) sent a decision out of order"));
  }
}

TEST(Hostile, ADecisionTwice) {
  Stage stage(1);
  stage.say(FrameType::kDecided, 1, 4, "3");
  stage.say(FrameType::kDecided, 1, 4, "2");
  EXPECT_TRUE(has(stage.fails(), "out of order"));
}

TEST(Hostile, DecisionsByAMember) {
  Stage stage(0);
  stage.post();
  stage.say(FrameType::kDecided, 1, 1, "");
  EXPECT_TRUE(has(stage.fails(), "rank 1 (impostor) decides, and is not the coordinator"));
}

TEST(Hostile, ArrivalsAtAMember) {
  Stage stage(1);
  stage.say(FrameType::kArrived, 1, 1);
  EXPECT_TRUE(has(stage.fails(), "rank 0 (impostor) takes this rank for the coordinator"));
}

TEST(Hostile, ArrivalsThatCountWrong) {
  for (const uint64_t turn : {uint64_t{0}, uint64_t{2}, UINT64_MAX >> 3}) {
    Stage stage(0);
    stage.say(FrameType::kArrived, turn, 1);
    EXPECT_TRUE(has(stage.fails(), "rank 1 (impostor) counts its collectives wrong"));
  }
  Stage far(0);
  for (uint64_t turn = 1; turn < 6000; ++turn) far.say(FrameType::kArrived, turn, turn);
  EXPECT_TRUE(has(far.fails(), "rank 1 (impostor) counts its collectives wrong"));
}

TEST(Hostile, AnArrivalAtAnotherCollective) {
  Stage stage(0);
  stage.say(FrameType::kArrived, 1, 2);
  stage.post();
  EXPECT_TRUE(has(stage.fails(), "all ranks must call the same collectives in the same order"));
}

// A peer that knows all addresses may call before this rank knows any.
TEST(Decisions, AnArrivalBeforeTheAddresses) {
  Engine engine({"lo", false});
  const Membership member = membership(0, 3);
  const std::shared_ptr<Group> group = engine.join(member);
  engine.decide_by(group, rules());
  Impostor impostor(engine, false);
  Membership other = member;
  other.rank = 1;
  EXPECT_TRUE(impostor.introduce(other, 0, Lane::kMessages));
  FrameHeader header;
  header.type = FrameType::kArrived;
  header.offset = header.seq = 1;
  header.call = {Kind::kAllReduce, DType::kInt32, ReduceOp::kSum, 0, 0, 1000, 0};
  impostor.send(header, {});
  std::this_thread::sleep_for(50ms);
  EXPECT_EQ(engine.failure(group), "");
  const PeerAddress nobody = {"nobody", "127.0.0.1:1", ""};
  engine.introduce(group, {engine.address(), nobody, nobody});
  for (int i = 0; i < 2000 && engine.failure(group).empty(); ++i) std::this_thread::sleep_for(10ms);
  EXPECT_TRUE(has(engine.failure(group), "rank 2 (nobody)"));
  engine.leave(group);
}

}  // namespace
}  // namespace paceline::testing
