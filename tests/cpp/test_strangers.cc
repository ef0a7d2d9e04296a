// Strangers at the listening port, listeners who repeat what a member has said, and a door where nobody is let in.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstring>
#include <thread>

#include "impostor.h"
#include "ranks.h"

namespace paceline::testing {
namespace {

using namespace std::chrono_literals;

// Whatever comes to the listening port, members still find each other.
class Port : public ::testing::TestWithParam<bool> {};

INSTANTIATE_TEST_SUITE_P(Core, Port, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "shm" : "tcp"; });

// For a member that has sent its confirmation the connection is open: a mere end of it would look like a death.
TEST_P(Port, WhoIsBeingIntroducedHearsWhyTheGroupEnds) {
  for (const bool fails : {false, true}) {
    Ranks ranks(2, {GetParam(), 30s});
    Membership member = ranks.group(0)->membership();
    member.rank = 1;
    Impostor impostor(ranks.engine(0), GetParam());
    ASSERT_TRUE(impostor.introduce(member, 0, Lane::kCollective, false));
    if (fails) ranks.engine(0).abort(ranks.group(0), "enough");
    ranks.leave(0);
    std::vector<uint8_t> words;
    const std::optional<FrameHeader> said = impostor.receive_frame(&words);
    ASSERT_TRUE(said.has_value());
    EXPECT_EQ(said->type, fails ? FrameType::kError : FrameType::kBye);
    EXPECT_EQ(std::string(words.begin(), words.end()), fails ? "enough" : "");
  }
}

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
        stranger.send(encode(other, member.secret));
        break;
      case 3:
        other.group.fill(0xee);
        stranger.send(encode(other, member.secret));
        break;
      case 4:
        other.epoch += 1;
        stranger.send(encode(other, member.secret));
        break;
      case 5:
        other.from_rank = i == 5 ? 0 : 7;  // itself; nobody
        stranger.send(encode(other, member.secret));
        break;
      case 6:  // half a hello, then the end
        stranger.send(std::span<const uint8_t>(encode(other, member.secret)).first(i / 2));
        stranger.shut();
        break;
      case 7:
        stranger.reset();
        break;
      default:  // another lane than those there are
        stranger.send([&] {
          HelloBytes bytes = encode(other, member.secret);
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

Hello hello_of(const Membership& member, uint32_t from, uint32_t to) {
  Hello hello;
  hello.group = member.id;
  hello.epoch = member.epoch;
  hello.from_rank = from;
  hello.to_rank = to;
  hello.nonce = random_nonce();
  return hello;
}

// The ranks meet and work, first one and then the other.
void expect_work(Ranks& ranks, uint32_t first) {
  const Job job(swap_all_reduce(), Kind::kAllReduce, 2, 5000, 1);
  const Pending one = ranks.post(first, job.operation(first));
  std::this_thread::sleep_for(30ms);
  const Pending other = ranks.post(1 - first, job.operation(1 - first));
  EXPECT_EQ(one.wait(), "");
  EXPECT_EQ(other.wait(), "");
  EXPECT_TRUE(job.right());
}

// Somebody who knows the group's number, but not its secret, is sent away at once, and takes no member's place.
TEST_P(Port, AStrangerWhoKnowsTheGroupsNumber) {
  for (const uint32_t victim : {0u, 1u}) {
    Ranks ranks(2, {GetParam(), 8s});
    const Membership& member = ranks.group(0)->membership();
    Secret guess = member.secret;
    guess[0] ^= 1;
    Impostor stranger(ranks.engine(victim), GetParam());
    stranger.send(encode(hello_of(member, 1 - victim, victim), guess));
    WelcomeBytes answer;
    EXPECT_FALSE(stranger.receive(answer));
    expect_work(ranks, victim);
  }
}

// Who has listened can say once more what a member has said, but not a second time, and it leads nowhere.
TEST_P(Port, AListenerWhoRepeatsAHello) {
  for (const uint32_t victim : {0u, 1u}) {
    Ranks ranks(2, {GetParam(), 8s});
    const Membership& member = ranks.group(0)->membership();
    const HelloBytes heard = encode(hello_of(member, 1 - victim, victim), member.secret);
    WelcomeBytes answer;
    {
      Impostor listener(ranks.engine(victim), GetParam());
      listener.send(heard);
      EXPECT_TRUE(listener.receive(answer));
    }
    Impostor again(ranks.engine(victim), GetParam());
    again.send(heard);
    EXPECT_FALSE(again.receive(answer));
    expect_work(ranks, victim);
  }
}

// A listener whose repetition comes before what it repeats holds a member's place for a moment: until it proves wrong,
// or goes away. The members connect all the same, whichever of the two is the lower rank.
TEST_P(Port, AListenerWhoIsFaster) {
  for (const uint32_t victim : {0u, 1u}) {
    for (const bool lies : {false, true}) {
      Ranks ranks(2, {GetParam(), 8s});
      const Membership& member = ranks.group(0)->membership();
      Impostor listener(ranks.engine(victim), GetParam());
      listener.send(encode(hello_of(member, 1 - victim, victim), member.secret));
      WelcomeBytes answer;
      ASSERT_TRUE(listener.receive(answer));
      // The member comes while the listener holds its place.
      const Job job(swap_all_reduce(), Kind::kAllReduce, 2, 5000, 1);
      const Pending first = ranks.post(1 - victim, job.operation(1 - victim));
      std::this_thread::sleep_for(30ms);
      const Pending second = ranks.post(victim, job.operation(victim));
      std::this_thread::sleep_for(30ms);
      if (lies) {
        listener.send(std::vector<uint8_t>(kConfirmBytes, 1));
      } else {
        listener.shut();
      }
      EXPECT_EQ(first.wait(), "") << victim << lies;
      EXPECT_EQ(second.wait(), "") << victim << lies;
    }
  }
}

// A Unix socket where one is waiting to be let in and nobody else may wait: connecting to it fails at once.
class FullDoor {
 public:
  explicit FullDoor(const Engine& engine) {
    const std::string name = "paceline-test-" + std::to_string(::getpid());
    const std::string beside = engine.address().shm;
    address_ = beside.substr(0, beside.find(' ') + 1) + name;
    sockaddr_un where{};
    where.sun_family = AF_UNIX;
    std::memcpy(where.sun_path + 1, name.data(), name.size());
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    listener_ = Fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    first_ = Fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::bind(listener_.get(), reinterpret_cast<sockaddr*>(&where), length), 0);
    EXPECT_EQ(::listen(listener_.get(), 0), 0);
    EXPECT_EQ(::connect(first_.get(), reinterpret_cast<sockaddr*>(&where), length), 0);
  }

  const std::string& address() const { return address_; }
  // The next who waits; an empty Fd if nobody comes for some seconds.
  Fd let_in() {
    pollfd waiting{listener_.get(), POLLIN, 0};
    return ::poll(&waiting, 1, 10000) == 1 ? Fd(::accept(listener_.get(), nullptr, nullptr)) : Fd();
  }

 private:
  std::string address_;
  Fd listener_, first_;
};

TEST(Backlog, WhoIsNotLetInKnocksAgain) {
  Engine engine({"lo", true});
  FullDoor door(engine);
  const Membership member = membership(0, 2);
  const std::shared_ptr<Group> group = engine.join(member);
  engine.introduce(group, {engine.address(), {"busy", "127.0.0.1:1", door.address()}});
  const Job job(swap_all_reduce(), Kind::kAllReduce, 2, 1000, 1);
  const auto operation = job.operation(0);
  std::promise<std::string> promise;
  operation->timeout = 30s;
  operation->on_done = [&](const std::string& error) { promise.set_value(error); };
  engine.post(group, operation, true);
  const Pending pending(promise.get_future());
  std::this_thread::sleep_for(50ms);
  EXPECT_FALSE(pending.ready()) << pending.wait();
  EXPECT_TRUE(door.let_in());
  const Fd knocking = door.let_in();
  ASSERT_TRUE(knocking);
  HelloBytes hello;
  ASSERT_EQ(::recv(knocking.get(), hello.data(), hello.size(), MSG_WAITALL), static_cast<ssize_t>(hello.size()));
  EXPECT_TRUE(proven(hello, member.secret));
  engine.leave(group);
  EXPECT_NE(pending.wait(), "");
}

}  // namespace
}  // namespace paceline::testing
