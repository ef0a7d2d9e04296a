// Point-to-point messages: all sizes, tags out of order, any source, waiting on either side.
#include <gtest/gtest.h>

#include <thread>

#include "ranks.h"

namespace paceline::testing {
namespace {

using namespace std::chrono_literals;

class Messages : public ::testing::TestWithParam<bool> {
 protected:
  RankOptions options() const { return {GetParam(), 60s}; }
};

INSTANTIATE_TEST_SUITE_P(Core, Messages, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "shm" : "tcp"; });

// Sizes around the limits: in the frame 8 KB, eager 64 KB, pieces of 128 KB, rings of a megabyte.
constexpr size_t kSizes[] = {0,     1,      71,      4096,    8192,          65535,   65536,
                             65537, 131072, 1000000, 1 << 20, (1 << 20) + 1, 3 << 20, 100};

TEST_P(Messages, AllSizesReceiverFirst) {
  Ranks ranks(2, options());
  for (const size_t size : kSizes) {
    std::vector<uint8_t> out = random_bytes(size, static_cast<uint32_t>(size)), in(size);
    Pending received = ranks.receive(1, 0, 7, in);
    EXPECT_EQ(ranks.send(0, 1, 7, out).wait(), "");
    EXPECT_EQ(received.wait(), "");
    EXPECT_EQ(in, out) << size;
  }
}

TEST_P(Messages, AllSizesSenderFirst) {
  Ranks ranks(2, options());
  for (const size_t size : kSizes) {
    std::vector<uint8_t> out = random_bytes(size, static_cast<uint32_t>(size)), in(size);
    Pending sent = ranks.send(0, 1, 7, out);
    std::this_thread::sleep_for(2ms);
    EXPECT_EQ(ranks.receive(1, 0, 7, in).wait(), "");
    EXPECT_EQ(sent.wait(), "");
    EXPECT_EQ(in, out) << size;
  }
}

// Everything is sent before anything is received, and received in the opposite order of tags; of one tag, in order.
TEST_P(Messages, TagsOutOfOrder) {
  Ranks ranks(2, options());
  std::vector<std::vector<uint8_t>> out, in;
  for (uint32_t i = 0; i < 2 * std::size(kSizes); ++i) {
    out.push_back(random_bytes(kSizes[i / 2], i));
    in.emplace_back(kSizes[i / 2]);
  }
  std::vector<Pending> pending;
  for (uint32_t i = 0; i < out.size(); ++i) pending.push_back(ranks.send(0, 1, i / 2, out[i]));
  for (uint32_t tag = std::size(kSizes); tag-- > 0;) {
    pending.push_back(ranks.receive(1, 0, tag, in[2 * tag]));
    pending.push_back(ranks.receive(1, 0, tag, in[2 * tag + 1]));
  }
  for (Pending& entry : pending) EXPECT_EQ(entry.wait(), "");
  EXPECT_EQ(in, out);
}

TEST_P(Messages, BothSendFirst) {
  Ranks ranks(2, options());
  for (const size_t size : kSizes) {
    std::vector<uint8_t> a = random_bytes(size, 1), b = random_bytes(size, 2), from_a(size), from_b(size);
    std::vector<Pending> pending;
    pending.push_back(ranks.send(0, 1, 0, a));
    pending.push_back(ranks.send(1, 0, 0, b));
    pending.push_back(ranks.receive(0, 1, 0, from_b));
    pending.push_back(ranks.receive(1, 0, 0, from_a));
    for (Pending& entry : pending) ASSERT_EQ(entry.wait(), "");
    EXPECT_EQ(from_a, a);
    EXPECT_EQ(from_b, b);
  }
}

TEST_P(Messages, FromAnySource) {
  constexpr uint32_t kRanks = 4;
  Ranks ranks(kRanks, options());
  for (const size_t size : {10, 70000}) {
    std::vector<std::vector<uint8_t>> out, in(kRanks - 1, std::vector<uint8_t>(static_cast<size_t>(size)));
    std::vector<int64_t> senders(kRanks - 1, -1);
    std::vector<Pending> received, sent;
    for (uint32_t i = 0; i + 1 < kRanks; ++i) received.push_back(ranks.receive(0, -1, 3, in[i], 0, &senders[i]));
    for (uint32_t rank = 1; rank < kRanks; ++rank) {
      out.push_back(random_bytes(static_cast<size_t>(size), rank));
    }
    for (uint32_t rank = 1; rank < kRanks; ++rank) sent.push_back(ranks.send(rank, 0, 3, out[rank - 1]));
    for (Pending& entry : sent) ASSERT_EQ(entry.wait(), "");
    for (Pending& entry : received) ASSERT_EQ(entry.wait(), "");
    for (uint32_t i = 0; i + 1 < kRanks; ++i) {
      ASSERT_GE(senders[i], 1);
      EXPECT_EQ(in[i], out[static_cast<size_t>(senders[i] - 1)]);
    }
    std::sort(senders.begin(), senders.end());
    EXPECT_EQ(senders, (std::vector<int64_t>{1, 2, 3}));
  }
}

TEST_P(Messages, BesideCollectives) {
  Ranks ranks(2, options());
  std::vector<Pending> pending;
  std::vector<std::unique_ptr<Job>> jobs;
  std::vector<std::vector<uint8_t>> out, in;
  for (uint32_t i = 0; i < 20; ++i) {
    out.push_back(random_bytes(i * 20000, i));
    in.emplace_back(i * 20000);
    jobs.push_back(std::make_unique<Job>(swap_all_reduce(), Kind::kAllReduce, 2, i * 7000, i));
  }
  for (uint32_t i = 0; i < 20; ++i) {
    pending.push_back(ranks.send(i % 2, 1 - i % 2, i, out[i]));
    for (const uint32_t rank : {0u, 1u}) pending.push_back(ranks.post(rank, jobs[i]->operation(rank)));
    pending.push_back(ranks.receive(1 - i % 2, i % 2, i, in[i]));
  }
  for (Pending& entry : pending) ASSERT_EQ(entry.wait(), "");
  EXPECT_EQ(in, out);
  for (const auto& job : jobs) EXPECT_TRUE(job->right());
}

// What was sent arrives although the sender leaves at once: a goodbye on one connection overtakes nothing on the other.
TEST_P(Messages, TheLastWordBeforeLeaving) {
  for (uint32_t round = 0; round < 40; ++round) {
    Ranks ranks(2, options());
    const Job job(swap_all_reduce(), Kind::kAllReduce, 2, 5, 1);
    Pending a = ranks.post(0, job.operation(0)), b = ranks.post(1, job.operation(1));
    ASSERT_EQ(a.wait(), "");
    ASSERT_EQ(b.wait(), "");
    std::vector<uint8_t> out = random_bytes(60000, round), in(60000);
    Pending received = ranks.receive(1, 0, 1, in);
    ASSERT_EQ(ranks.send(0, 1, 1, out).wait(), "");
    ranks.leave(0);
    ASSERT_EQ(received.wait(), "") << round;
    ASSERT_EQ(in, out);
  }
}

// Messages that nobody wants fill what the receiver keeps. The others wait at the sender, where nothing is lost, and
// keep neither a later message waiting nor a collective.
TEST_P(Messages, ThatNobodyWants) {
  Ranks ranks(2, options());
  constexpr uint32_t kMessages = 200;
  std::vector<std::vector<uint8_t>> out, in(kMessages, std::vector<uint8_t>(60000));
  for (uint32_t i = 0; i < kMessages; ++i) out.push_back(random_bytes(60000, i));
  std::vector<Pending> pending;
  for (uint32_t i = 0; i < kMessages; ++i) pending.push_back(ranks.send(0, 1, i, out[i]));
  EXPECT_EQ(pending.front().wait(), "");
  std::vector<uint8_t> urgent = random_bytes(100, 1), arrived(100);
  Pending sent = ranks.send(0, 1, kMessages, urgent);
  EXPECT_EQ(ranks.receive(1, 0, kMessages, arrived).wait(), "");
  EXPECT_EQ(sent.wait(), "");
  EXPECT_EQ(arrived, urgent);
  const Job job(swap_all_reduce(), Kind::kAllReduce, 2, 300000, 1);
  const Pending one = ranks.post(0, job.operation(0)), other = ranks.post(1, job.operation(1));
  EXPECT_EQ(one.wait(), "");
  EXPECT_EQ(other.wait(), "");
  EXPECT_TRUE(job.right());
  EXPECT_FALSE(pending.back().ready());
  for (uint32_t i = kMessages; i-- > 0;) EXPECT_EQ(ranks.receive(1, 0, i, in[i]).wait(), "");
  for (Pending& entry : pending) EXPECT_EQ(entry.wait(), "");
  EXPECT_EQ(in, out);
}

// More than are kept and offered together; and again, since what was received makes room.
TEST_P(Messages, ManyEmptyOnes) {
  Ranks ranks(2, options());
  constexpr int kMessages = 25000;
  std::vector<uint8_t> nothing;
  for (int round = 0; round < 2; ++round) {
    std::vector<Pending> pending;
    for (int i = 0; i < kMessages; ++i) pending.push_back(ranks.send(0, 1, 7, nothing));
    EXPECT_FALSE(pending.back().ready());
    for (int i = 0; i < kMessages; ++i) pending.push_back(ranks.receive(1, 0, 7, nothing));
    for (Pending& entry : pending) ASSERT_EQ(entry.wait(), "");
  }
}

TEST_P(Messages, SizesThatDifferAreAnErrorOnBothSides) {
  for (const size_t size : {100, 100000}) {
    Ranks ranks(2, options());
    std::vector<uint8_t> out(static_cast<size_t>(size)), in(static_cast<size_t>(size) + 1);
    Pending received = ranks.receive(1, 0, 0, in);
    Pending sent = ranks.send(0, 1, 0, out);
    EXPECT_NE(received.wait().find("must have the same size"), std::string::npos);
    const std::string told = sent.wait();  // a small one may be done before
    if (size > 65536) {
      EXPECT_NE(told.find("must have the same size"), std::string::npos);
    }
    std::vector<uint8_t> again(1);
    EXPECT_NE(ranks.send(1, 0, 0, again).wait(), "");  // the group has failed for good
  }
}

TEST_P(Messages, AReceiveThatTimesOutLeavesTheGroupAlone) {
  Ranks ranks(2, options());
  std::vector<uint8_t> in(10), out = random_bytes(10, 1);
  EXPECT_NE(ranks.receive(0, 1, 5, in, 0, nullptr, 100ms).wait().find("timed out"), std::string::npos);
  Pending sent = ranks.send(1, 0, 6, out);
  EXPECT_EQ(ranks.receive(0, 1, 6, in).wait(), "");
  EXPECT_EQ(sent.wait(), "");
  EXPECT_EQ(in, out);
}

// The time limit counts from when somebody waits.
TEST_P(Messages, AReceiveThatNobodyWaitsForHasAllTheTime) {
  Ranks ranks(2, options());
  std::vector<uint8_t> in(10);
  std::promise<std::string> promise;
  const auto message = std::make_shared<Message>();
  message->peer = 1;
  message->data = in.data();
  message->bytes = in.size();
  message->on_done = [&](const std::string& error) { promise.set_value(error); };
  ranks.engine(0).receive(ranks.group(0), message);
  const Pending received(promise.get_future());
  std::this_thread::sleep_for(700ms);  // the engine looks at deadlines at least twice a second
  EXPECT_FALSE(received.ready());
  ranks.engine(0).hurry(message, 50ms);
  EXPECT_NE(received.wait().find("timed out"), std::string::npos) << received.wait();
}

}  // namespace
}  // namespace paceline::testing
