// Peers that say the wrong thing, half of it, or nothing; strangers at the listening port. The group may fail, with a
// sentence; the process may not, and no operation may hang.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <functional>
#include <thread>

#include "impostor.h"
#include "ranks.h"

namespace paceline::testing {
namespace {

using namespace std::chrono_literals;

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Rank 0 is an engine; rank 1 is played by the test.
class Victim {
 public:
  explicit Victim(bool shm = false) : engine_({"lo", shm}), shm_(shm), member_(membership(0, 2)) {
    group_ = engine_.join(member_);
    engine_.introduce(group_, {engine_.address(), {"impostor", "127.0.0.1:1", ""}});
  }
  ~Victim() { engine_.leave(group_); }

  Impostor impostor(Lane lane) {
    Impostor impostor(engine_, shm_);
    Membership other = member_;
    other.rank = 1;
    EXPECT_TRUE(impostor.introduce(other, 0, lane));
    std::this_thread::sleep_for(20ms);  // until the engine has read the last message
    return impostor;
  }

  Pending post(const Job& job, std::chrono::milliseconds timeout = 20s) {
    operation_ = job.operation(0);
    operation_->timeout = timeout;
    const auto promise = std::make_shared<std::promise<std::string>>();
    operation_->on_done = [promise](const std::string& error) { promise->set_value(error); };
    engine_.post(group_, operation_, true);
    return Pending(promise->get_future());
  }

  Pending message(bool receives, uint32_t tag, std::vector<uint8_t>& bytes, std::chrono::milliseconds timeout = 20s) {
    const auto promise = std::make_shared<std::promise<std::string>>();
    const auto message = std::make_shared<Message>();
    message->peer = 1;
    message->tag = tag;
    message->data = bytes.data();
    message->bytes = bytes.size();
    message->timeout = timeout;
    message->on_done = [promise](const std::string& error) { promise->set_value(error); };
    if (receives) {
      engine_.receive(group_, message);
    } else {
      engine_.send(group_, message);
    }
    return Pending(promise->get_future());
  }

  std::string failure() { return engine_.failure(group_); }
  // The failure, as soon as there is one.
  std::string fails() {
    for (int i = 0; i < 500 && failure().empty(); ++i) std::this_thread::sleep_for(10ms);
    return failure();
  }
  // The call of the operation posted last, as rank 1 would put it into its frames.
  const Call& call() const { return operation_->call; }
  Engine& engine() { return engine_; }
  const Membership& member() const { return member_; }
  const std::shared_ptr<Group>& group() const { return group_; }

 private:
  Engine engine_;
  bool shm_;
  Membership member_;
  std::shared_ptr<Group> group_;
  std::shared_ptr<Operation> operation_;
};

FrameHeader data_frame(const Call& call, uint64_t total, uint64_t offset, uint64_t length) {
  FrameHeader header;
  header.type = FrameType::kData;
  header.seq = 1;
  header.total = total;
  header.offset = offset;
  header.length = length;
  header.call = call;
  return header;
}

FrameHeader message_frame(FrameType type, uint64_t number, uint32_t tag, uint64_t length) {
  FrameHeader header;
  header.type = type;
  header.seq = number;
  header.id = tag;
  header.length = length;
  return header;
}

const Schedule kToZero{"to zero", 1, {{0, 1, 0, 0, 1, false}}};

Job to_zero(uint64_t count) { return {kToZero, Kind::kBroadcast, 2, count, 1}; }

// The frame of a collective that is not called yet, half of it before the call and half after.
TEST(Halves, AFrameThatTheCallInterrupts) {
  Victim victim;
  Impostor impostor = victim.impostor(Lane::kCollective);
  const Job job = to_zero(1000);
  Call call = job.operation(0)->call;
  call.schedule = job.operation(0)->program->digest();
  const std::vector<uint8_t> bytes = random_bytes(4000, 1);
  impostor.send(data_frame(call, 4000, 0, 4000), std::span(bytes).first(1500));
  std::this_thread::sleep_for(50ms);
  Pending pending = victim.post(job);
  impostor.send(std::span(bytes).subspan(1500));
  EXPECT_EQ(pending.wait(5s), "");
}

TEST(Halves, APeerThatClosesInTheMiddleOfAFrame) {
  for (const bool reset : {false, true}) {
    Victim victim;
    Impostor impostor = victim.impostor(Lane::kCollective);
    const Job job = to_zero(1000);
    Pending pending = victim.post(job);
    impostor.send(data_frame(victim.call(), 4000, 0, 4000), random_bytes(1500, 1));
    if (reset) {
      impostor.reset();
    } else {
      impostor.shut();
    }
    const std::string error = pending.wait();
    EXPECT_TRUE(has(error, "rank 1 (impostor)") && has(error, "its process died")) << error;
  }
}

TEST(Halves, APeerThatStopsInTheMiddleOfAMessage) {
  Victim victim;
  Impostor impostor = victim.impostor(Lane::kMessages);
  std::vector<uint8_t> in(4000);
  Pending pending = victim.message(true, 3, in, 300ms);
  impostor.send(message_frame(FrameType::kMessage, 0, 3, 4000), random_bytes(1500, 1));
  const std::string error = pending.wait(5s);
  EXPECT_TRUE(has(error, "timed out")) << error;
}

TEST(Halves, OneByteAtATime) {
  Victim victim;
  Impostor impostor = victim.impostor(Lane::kMessages);
  std::vector<uint8_t> in(100);
  Pending pending = victim.message(true, 3, in);
  std::array<uint8_t, kFrameHeaderBytes> header;
  encode(message_frame(FrameType::kMessage, 0, 3, 100), header);
  for (const uint8_t& byte : header) {
    impostor.send(std::span(&byte, 1));
    std::this_thread::sleep_for(200us);
  }
  const std::vector<uint8_t> bytes = random_bytes(100, 1);
  for (const uint8_t& byte : bytes) impostor.send(std::span(&byte, 1));
  EXPECT_EQ(pending.wait(), "");
  EXPECT_EQ(in, bytes);
}

// One frame that makes no sense while rank 0 waits in a collective of 400 KB: the collective ends with an error.
void expect_refused(const char* what, bool shm, const std::function<FrameHeader(FrameHeader)>& spoil) {
  Victim victim(shm);
  Impostor impostor = victim.impostor(Lane::kCollective);
  const Job job = to_zero(100000);
  Pending pending = victim.post(job);
  const FrameHeader header = spoil(data_frame(victim.call(), 400000, 0, 131072));
  impostor.send(header, std::vector<uint8_t>(std::min<uint64_t>(header.streamed_bytes(), 200000)));
  const std::string error = pending.wait(5s);
  EXPECT_TRUE(has(error, "rank 1")) << what << ": " << error;
  EXPECT_FALSE(has(error, "died")) << what << ": " << error;
}

TEST(Collectives, FramesThatMakeNoSense) {
  using Spoil = std::function<FrameHeader(FrameHeader)>;
  const std::vector<std::pair<const char*, Spoil>> spoils = {
      {"another call",
       [](FrameHeader h) {
         h.call.count = 7;
         return h;
       }},
      {"another schedule",
       [](FrameHeader h) {
         h.call.schedule ^= 1;
         return h;
       }},
      {"a wire that is not there",
       [](FrameHeader h) {
         h.id = 1;
         return h;
       }},
      {"a wire far away",
       [](FrameHeader h) {
         h.id = UINT32_MAX;
         return h;
       }},
      {"a hole",
       [](FrameHeader h) {
         h.offset = 4;
         return h;
       }},
      {"too long",
       [](FrameHeader h) {
         h.length = 400004;
         return h;
       }},
      {"much too long",
       [](FrameHeader h) {
         h.length = (uint64_t{1} << 62) - 1;
         return h;
       }},
      {"another size",
       [](FrameHeader h) {
         h.total = 4;
         return h;
       }},
      {"nothing",
       [](FrameHeader h) {
         h.length = 0;
         return h;
       }},
      {"half an element",
       [](FrameHeader h) {
         h.length = 6;
         return h;
       }},
      {"number 0",
       [](FrameHeader h) {
         h.seq = 0;
         return h;
       }},
      {"a piece of nothing",
       [](FrameHeader h) {
         h.type = FrameType::kMore;
         return h;
       }},
      {"memory that was not passed",
       [](FrameHeader h) {
         h.type = FrameType::kRings;
         return h;
       }},
      {"payload in memory that was not passed",
       [](FrameHeader h) {
         h.shared = true;
         return h;
       }},
      {"a message",
       [](FrameHeader h) {
         h.type = FrameType::kMessage;
         return h;
       }},
      {"a message of later",
       [](FrameHeader h) {
         h.type = FrameType::kMessage;
         h.seq = 9;
         return h;
       }},
      {"an offer",
       [](FrameHeader h) {
         h.type = FrameType::kOffer;
         return h;
       }},
      {"an accept",
       [](FrameHeader h) {
         h.type = FrameType::kAccept;
         return h;
       }},
  };
  for (const bool shm : {false, true}) {
    for (const auto& [what, spoil] : spoils) expect_refused(what, shm, spoil);
  }
}

TEST(Collectives, BytesThatAreNoFrame) {
  Victim victim;
  Impostor impostor = victim.impostor(Lane::kCollective);
  const Job job = to_zero(1000);
  Pending pending = victim.post(job);
  impostor.send(random_bytes(5000, 3));
  EXPECT_TRUE(has(pending.wait(), "sent bytes that are no frame")) << pending.wait();
}

// A frame of a later collective, too large to keep, and then the end of the stream: only what can exist is kept.
TEST(Collectives, AHugeEarlyFrameOfAPeerThatHangsUp) {
  Victim victim;
  Impostor impostor = victim.impostor(Lane::kCollective);
  FrameHeader header = data_frame(Call{}, uint64_t{1} << 60, 0, uint64_t{1} << 60);
  header.seq = 5;
  impostor.send(header, random_bytes(1000, 1));
  std::this_thread::sleep_for(20ms);
  impostor.shut();
  EXPECT_TRUE(has(victim.fails(), "rank 1 (impostor)")) << victim.failure();
}

// The same, where the end of the stream lies behind more than the kernel takes: nobody sees it who does not read.
TEST(Collectives, AnEndBehindAFullWindow) {
  Victim victim;
  Impostor impostor = victim.impostor(Lane::kCollective);
  const Job job = to_zero(1000);
  const Pending pending = victim.post(job);
  FrameHeader header = data_frame(victim.call(), 100000, 0, 100000);
  for (header.seq = 5; header.seq < 9; ++header.seq) impostor.send(header, random_bytes(100000, 1));
  impostor.shut();
  EXPECT_TRUE(has(pending.wait(5s), "rank 1 (impostor)"));
}

// Rank 1 shares memory, and then says things about it that make no sense.
TEST(Collectives, SharedMemoryThatMakesNoSense) {
  const Fd small(::memfd_create("small", MFD_ALLOW_SEALING));
  using Say = std::function<void(Impostor&, const Rings&, const Call&)>;
  const std::vector<std::pair<const char*, Say>> says = {
      {"a file that is no segment", [&](Impostor& i, const Rings&, const Call&) { i.share(small.get()); }},
      {"a segment twice",
       [](Impostor& i, const Rings& rings, const Call&) {
         i.share(rings.fd());
         i.share(rings.fd());
       }},
      {"a frame between two pieces",
       [](Impostor& i, const Rings& rings, const Call& call) {
         i.share(rings.fd());
         FrameHeader header = data_frame(call, 400000, 0, 400000);
         header.shared = true;
         i.send(header);
         i.send(data_frame(call, 400000, 131072, 100), random_bytes(100, 1));
       }},
      {"a piece too many",
       [](Impostor& i, const Rings& rings, const Call& call) {
         i.share(rings.fd());
         FrameHeader header = data_frame(call, 400000, 0, 131072);
         header.shared = true;
         i.send(header);
         header.type = FrameType::kMore;
         header.shared = false;
         i.send(header);
       }},
  };
  for (const auto& [what, say] : says) {
    Victim victim(true);
    Impostor impostor = victim.impostor(Lane::kCollective);
    const Rings rings;
    const Job job = to_zero(100000);
    const Pending pending = victim.post(job);
    say(impostor, rings, victim.call());
    EXPECT_TRUE(has(pending.wait(5s), "rank 1 (impostor)")) << what << ": " << pending.wait();
  }
}

// A whole transfer by a segment that the test wrote.
TEST(Collectives, SharedMemory) {
  Victim victim(true);
  Impostor impostor = victim.impostor(Lane::kCollective);
  Rings rings;
  impostor.share(rings.fd());
  const Job job = to_zero(25000);
  const Pending pending = victim.post(job);
  ASSERT_TRUE(rings.put(random_bytes(100000, 1).data(), 100000));
  FrameHeader header = data_frame(victim.call(), 100000, 0, 100000);
  header.shared = true;
  impostor.send(header);
  EXPECT_EQ(pending.wait(5s), "");
}

TEST(Messages, FramesThatMakeNoSense) {
  using Send = std::function<void(Impostor&)>;
  const std::vector<std::pair<const char*, Send>> sends = {
      {"data", [](Impostor& i) { i.send(data_frame(Call{}, 100, 0, 100), random_bytes(100, 1)); }},
      {"data of a collective", [](Impostor& i) { i.send(data_frame(Call{}, 100, 0, 8000), random_bytes(8000, 1)); }},
      {"posted", [](Impostor& i) { i.send(message_frame(FrameType::kPosted, 0, 3, 100)); }},
      {"not offered", [](Impostor& i) { i.send(message_frame(FrameType::kMessage, 0, 3, 100000)); }},
      {"huge", [](Impostor& i) { i.send(message_frame(FrameType::kMessage, 0, 3, uint64_t{1} << 60)); }},
      {"not offered, but awaited", [](Impostor& i) { i.send(message_frame(FrameType::kMessage, 0, 4, 100000)); }},
      {"accept of nothing", [](Impostor& i) { i.send(message_frame(FrameType::kAccept, 0, 3, 0)); }},
      {"a number from the future", [](Impostor& i) { i.send(message_frame(FrameType::kOffer, 5, 9, 100000)); }},
      {"a number twice",
       [](Impostor& i) {
         i.send(message_frame(FrameType::kOffer, 0, 9, 100000));
         i.send(message_frame(FrameType::kOffer, 0, 9, 100000));
       }},
  };
  for (const bool shm : {false, true}) {
    for (const auto& [what, send] : sends) {
      Victim victim(shm);
      Impostor impostor = victim.impostor(Lane::kMessages);
      std::vector<uint8_t> in(200);
      Pending pending = victim.message(true, 4, in);
      send(impostor);
      const std::string error = pending.wait(5s);
      EXPECT_TRUE(has(error, "rank 1 (impostor)")) << what << ": " << error;
      EXPECT_FALSE(has(error, "died")) << what << ": " << error;
    }
  }
}

// Accepted twice, the second time when the sender's buffer may be gone.
TEST(Messages, AcceptedTwice) {
  Victim victim;
  Impostor impostor = victim.impostor(Lane::kMessages);
  auto out = std::make_unique<std::vector<uint8_t>>(random_bytes(8 << 20, 1));
  Pending pending = victim.message(false, 3, *out);
  const std::optional<FrameHeader> offer = impostor.receive_frame();
  ASSERT_TRUE(offer && offer->type == FrameType::kOffer);
  impostor.send(message_frame(FrameType::kAccept, offer->seq, 3, 0));
  impostor.send(message_frame(FrameType::kAccept, offer->seq, 3, 0));
  const std::string error = pending.wait();
  out.reset();
  EXPECT_TRUE(has(error, "rank 1 (impostor)")) << error;
}

// An eager message needs no leave: accepting it would send it twice.
TEST(Messages, AcceptOfAMessageThatWasNotOffered) {
  Victim victim;
  Impostor impostor = victim.impostor(Lane::kMessages);
  std::vector<uint8_t> out(100), in(100);
  Pending waiting = victim.message(true, 9, in);
  EXPECT_EQ(victim.message(false, 3, out).wait(), "");
  impostor.send(message_frame(FrameType::kAccept, 0, 3, 0));
  EXPECT_TRUE(has(waiting.wait(), "accepted a message it was not offered")) << waiting.wait();
}

TEST(Errors, AreToldAndEnd) {
  Victim victim;
  Impostor impostor = victim.impostor(Lane::kCollective);
  const Job job = to_zero(1000);
  Pending pending = victim.post(job);
  const std::string text = "the sky is falling";
  FrameHeader header = message_frame(FrameType::kError, 0, 1, text.size());
  impostor.send(header, std::vector<uint8_t>(text.begin(), text.end()));
  EXPECT_TRUE(has(pending.wait(), "the sky is falling (told by rank 1)")) << pending.wait();
}

// Whatever comes to the listening port, members still find each other.
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
