// Strangers at the listening port: whatever they say, half of it, or nothing, members still find each other.
#include <gtest/gtest.h>

#include <thread>

#include "impostor.h"
#include "ranks.h"

namespace paceline::testing {
namespace {

using namespace std::chrono_literals;

class Port : public ::testing::TestWithParam<bool> {};

INSTANTIATE_TEST_SUITE_P(Core, Port, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "shm" : "tcp"; });

TEST_P(Port, GarbageAndHalfOpenConnections) {
  Ranks ranks(2, {GetParam(), 30s});
  std::vector<std::unique_ptr<Impostor>> crowd;
  Membership member = ranks.group(0)->membership();
  member.rank = 1;
  Hello hello;
  hello.group = member.id;
  hello.epoch = member.epoch;
  hello.from_rank = 1;
  for (uint32_t i = 0; i < 90; ++i) {
    crowd.push_back(std::make_unique<Impostor>(ranks.engine(0), GetParam()));
    Impostor& stranger = *crowd.back();
    Hello other = hello;
    switch (i % 9) {
      case 0:  // says nothing
        break;
      case 1:
        stranger.send(random_bytes(i * 10, i));
        break;
      case 2:
        other.version = 99;
        stranger.send(encode(other));
        break;
      case 3:
        other.group.fill(0xee);
        stranger.send(encode(other));
        break;
      case 4:
        other.epoch += 1;
        stranger.send(encode(other));
        break;
      case 5:
        other.from_rank = i == 5 ? 0 : 7;  // itself; nobody
        stranger.send(encode(other));
        break;
      case 6:  // half a hello, then the end
        stranger.send(std::span<const uint8_t>(encode(other)).first(i / 2));
        stranger.shut();
        break;
      case 7:
        stranger.reset();
        break;
      default:  // another lane than those there are
        stranger.send([&] {
          HelloBytes bytes = encode(other);
          bytes[10] = 9;
          return bytes;
        }());
    }
  }
  const Job job(swap_all_reduce(), Kind::kAllReduce, 2, 50000, 1);
  Pending first = ranks.post(0, job.operation(0)), second = ranks.post(1, job.operation(1));
  EXPECT_EQ(first.wait(), "");
  EXPECT_EQ(second.wait(), "");
  EXPECT_TRUE(job.right());
}

// Somebody who knows the group's number, but not its secret, takes a member's place for a moment: with a wrong proof,
// and by going away. The members connect all the same, whichever of the two is the lower rank.
TEST_P(Port, AStrangerWhoKnowsTheGroupsNumber) {
  for (const uint32_t victim : {0u, 1u}) {
    for (const bool lies : {false, true}) {
      Ranks ranks(2, {GetParam(), 8s});
      Membership member = ranks.group(0)->membership();
      member.rank = 1 - victim;
      member.secret.fill(0x77);
      Hello hello;
      hello.group = member.id;
      hello.epoch = member.epoch;
      hello.from_rank = 1 - victim;
      hello.to_rank = victim;
      Impostor stranger(ranks.engine(victim), GetParam());
      stranger.send(encode(hello));
      WelcomeBytes answer;
      ASSERT_TRUE(stranger.receive(answer));
      // The member comes while the stranger holds its place.
      const Job job(swap_all_reduce(), Kind::kAllReduce, 2, 5000, 1);
      Pending first = ranks.post(1 - victim, job.operation(1 - victim));
      std::this_thread::sleep_for(30ms);
      Pending second = ranks.post(victim, job.operation(victim));
      std::this_thread::sleep_for(30ms);
      if (lies) {
        stranger.send(std::vector<uint8_t>(kConfirmBytes, 1));
      } else {
        stranger.shut();
      }
      EXPECT_EQ(first.wait(), "") << victim << lies;
      EXPECT_EQ(second.wait(), "") << victim << lies;
    }
  }
}

}  // namespace
}  // namespace paceline::testing
