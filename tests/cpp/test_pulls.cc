// Payload that the receiver reads from the sender's memory: who may, in what order, and what happens when it is not
// there.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "transport/pulls.h"
#include "victim.h"

namespace paceline::testing {
namespace {

using namespace std::chrono_literals;

constexpr uint64_t kCount = 1 << 19;
constexpr uint64_t kBytes = kCount * 4;  // enough to be lent

std::pair<Fd, Fd> sockets() {
  int fds[2] = {-1, -1};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
  return {Fd(fds[0]), Fd(fds[1])};
}

uint64_t address_of(const void* memory) { return reinterpret_cast<uint64_t>(memory); }

// Memory that nobody can read.
class Hole {
 public:
  ~Hole() { ::munmap(memory_, kBytes); }
  uint64_t address() const { return address_of(memory_); }

 private:
  void* memory_ = ::mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
};

void say_where(Impostor& impostor, FrameHeader header, uint64_t address) {
  header.type = FrameType::kAt;
  std::vector<uint8_t> bytes(sizeof(address));
  std::memcpy(bytes.data(), &address, sizeof(address));
  impostor.send(header, bytes);
}

TEST(Pulls, ReadTheOtherSidesMemory) {
  const auto [one, other] = sockets();
  const Pulls pulls(one.get()), theirs(other.get());
  EXPECT_TRUE(pulls.find(theirs.address(), theirs.word()));
  EXPECT_FALSE(pulls.find(theirs.address(), theirs.word() + 1));
  EXPECT_FALSE(pulls.find(0, 0));
  const std::vector<uint8_t> from = random_bytes(300000, 1);
  std::vector<uint8_t> to(from.size());
  EXPECT_EQ(pulls.read(address_of(from.data()), to.data(), to.size()), 0);
  EXPECT_EQ(from, to);
}

TEST(Pulls, SayWhenMemoryIsNotThere) {
  const auto [one, other] = sockets();
  const Pulls pulls(one.get());
  std::vector<uint8_t> to(kBytes);
  EXPECT_EQ(pulls.read(Hole().address(), to.data(), to.size()), EFAULT);
}

// Rank 1 has called two collectives when rank 0 calls the first, lends its memory, and waits before it calls the
// second. That it was read must not be told behind what rank 0 does not want yet.
TEST(Lending, NothingIsToldBehindALaterCollective) {
  for (const uint64_t later : {uint64_t{50000}, kCount}) {  // through the ring, and lent
    Ranks ranks(2, {true});
    const Job before(swap_all_reduce(), Kind::kAllReduce, 2, 1, 0);  // they know each other's memory after it
    const Pending ours = ranks.post(0, before.operation(0)), theirs = ranks.post(1, before.operation(1));
    EXPECT_EQ(ours.wait() + theirs.wait(), "");
    std::this_thread::sleep_for(50ms);
    const Job first(swap_all_reduce(), Kind::kAllReduce, 2, kCount, 1);
    const Job second(swap_all_reduce(), Kind::kAllReduce, 2, later, 2);
    const Pending one = ranks.post(1, first.operation(1)), two = ranks.post(1, second.operation(1));
    std::this_thread::sleep_for(50ms);
    EXPECT_EQ(ranks.post(0, first.operation(0)).wait(10s), "");
    EXPECT_EQ(ranks.post(0, second.operation(0)).wait(10s), "");
    EXPECT_EQ(one.wait(10s), "");
    EXPECT_EQ(two.wait(10s), "");
    EXPECT_TRUE(first.right());
    EXPECT_TRUE(second.right());
  }
}

// Memory is lent to who has said that he can read it, and to nobody else.
TEST(Lending, OnlyToWhoCanRead) {
  const Schedule to_one{"to one", 1, {{0, 0, 1, 0, 1, false}}};
  for (const bool readable : {false, true}) {
    Victim victim(true);
    Impostor impostor = victim.impostor(Lane::kCollective);
    Rings rings;
    impostor.share(rings.fd());
    FrameHeader header;
    header.type = FrameType::kReadable;
    if (readable) impostor.send(header);
    std::this_thread::sleep_for(50ms);
    const Job job(to_one, Kind::kBroadcast, 2, kCount, 1);
    const Pending pending = victim.post(job);
    std::vector<uint8_t> payload;
    const std::optional<FrameHeader> frame = impostor.receive_frame(&payload);
    ASSERT_TRUE(frame);
    EXPECT_EQ(frame->type, readable ? FrameType::kAt : FrameType::kData);
    if (!readable) continue;
    EXPECT_EQ(frame->length, kBytes);
    uint64_t address = 0;
    std::memcpy(&address, payload.data(), sizeof(address));
    EXPECT_EQ(address, address_of(job.operation(0)->places[0].input));
    std::this_thread::sleep_for(20ms);
    EXPECT_FALSE(pending.ready());  // until it has been read
    header = *frame;
    header.type = FrameType::kPulled;
    header.length = kBytes - 4;
    impostor.send(header);
    header.length = 4;
    impostor.send(header);
    EXPECT_EQ(pending.wait(5s), "");
  }
}

TEST(Lending, TheReceiverReadsAndSaysSo) {
  Victim victim(true);
  Impostor impostor = victim.impostor(Lane::kCollective);
  const Rings rings;
  impostor.share(rings.fd());
  const Job job = to_zero(kCount);
  const Pending pending = victim.post(job);
  const std::vector<uint8_t> memory = random_bytes(kBytes, 1);
  say_where(impostor, data_frame(victim.call(), kBytes, 0, kBytes), address_of(memory.data()));
  EXPECT_EQ(pending.wait(5s), "");
  EXPECT_EQ(std::memcmp(job.operation(0)->places[0].work, memory.data(), kBytes), 0);
  const std::optional<FrameHeader> frame = impostor.receive_frame();
  ASSERT_TRUE(frame && frame->type == FrameType::kPulled);
  EXPECT_EQ(frame->length, kBytes);
}

// Before the call the address is kept, and nothing is read.
TEST(Lending, BeforeTheCall) {
  Victim victim(true);
  Impostor impostor = victim.impostor(Lane::kCollective);
  const Rings rings;
  impostor.share(rings.fd());
  const Job job = to_zero(kCount);
  Call call = job.operation(0)->call;
  call.schedule = job.operation(0)->program->digest();
  std::vector<uint8_t> memory(kBytes);
  say_where(impostor, data_frame(call, kBytes, 0, kBytes), address_of(memory.data()));
  std::this_thread::sleep_for(50ms);
  const std::vector<uint8_t> later = random_bytes(kBytes, 2);
  std::memcpy(memory.data(), later.data(), kBytes);
  const Pending pending = victim.post(job);
  EXPECT_EQ(pending.wait(5s), "");
  EXPECT_EQ(std::memcmp(job.operation(0)->places[0].work, memory.data(), kBytes), 0);
}

// Who has taken back what he lent says why, and what was read of it is not used.
TEST(Lending, TakenBack) {
  Victim victim(true);
  Impostor impostor = victim.impostor(Lane::kCollective);
  Rings rings;
  impostor.share(rings.fd());
  std::this_thread::sleep_for(50ms);
  rings.close();
  const Job job = to_zero(kCount);
  const Pending pending = victim.post(job);
  const std::vector<uint8_t> memory(kBytes);
  say_where(impostor, data_frame(victim.call(), kBytes, 0, kBytes), address_of(memory.data()));
  std::this_thread::sleep_for(50ms);
  EXPECT_FALSE(pending.ready());
  const std::string text = "the sky is falling";
  impostor.send(message_frame(FrameType::kError, 0, 1, text.size()), std::vector<uint8_t>(text.begin(), text.end()));
  EXPECT_TRUE(has(pending.wait(5s), "the sky is falling (told by rank 1)")) << pending.wait();
}

// The peer ends while its memory is still needed, though it has sent all frames there are.
TEST(Lending, APeerThatEndsBeforeItsMemoryWasRead) {
  const Schedule after_itself{"after itself", 1, {{0, 1, 0, 0, 1, false}, {1, 1, 0, 0, 1, false}}};
  Victim victim(true);
  Impostor impostor = victim.impostor(Lane::kCollective);
  const Rings rings;
  impostor.share(rings.fd());
  const Job job(after_itself, Kind::kBroadcast, 2, kCount, 1);
  const Pending pending = victim.post(job);
  const std::vector<uint8_t> memory(kBytes);
  FrameHeader second = data_frame(victim.call(), kBytes, 0, kBytes);
  second.id = 1;
  say_where(impostor, second, address_of(memory.data()));
  impostor.shut();
  EXPECT_TRUE(has(pending.wait(5s), "rank 1 (impostor) closed its connection: its process died")) << pending.wait();
}

TEST(Lending, WhatMakesNoSense) {
  const Hole hole;
  const std::vector<uint8_t> memory(kBytes);
  using Say = std::function<void(Impostor&, FrameHeader)>;
  const std::vector<std::pair<const char*, Say>> says = {
      {"cannot be read", [&](Impostor& i, FrameHeader frame) { say_where(i, frame, hole.address()); }},
      {"cannot be read", [](Impostor& i, FrameHeader frame) { say_where(i, frame, UINT64_MAX - 100); }},
      {"cannot be read", [](Impostor& i, FrameHeader frame) { say_where(i, frame, 0); }},
      {"out of order",
       [&](Impostor& i, FrameHeader frame) {
         frame.offset = 4;
         say_where(i, frame, address_of(memory.data()));
       }},
      {"out of order",
       [&](Impostor& i, FrameHeader frame) {
         frame.length = kBytes + 4;
         say_where(i, frame, address_of(memory.data()));
       }},
      {"not part of the schedule",
       [](Impostor& i, FrameHeader frame) {
         frame.type = FrameType::kPulled;
         i.send(frame);
       }},
      {"memory it was not lent",
       [](Impostor& i, FrameHeader frame) {
         frame.type = FrameType::kPulled;
         frame.seq = 2;
         i.send(frame);
       }},
  };
  for (const auto& [what, say] : says) {
    Victim victim(true);
    Impostor impostor = victim.impostor(Lane::kCollective);
    const Rings rings;
    impostor.share(rings.fd());
    const Job job = to_zero(kCount);
    const Pending pending = victim.post(job);
    say(impostor, data_frame(victim.call(), kBytes, 0, kBytes));
    const std::string error = pending.wait(5s);
    EXPECT_TRUE(has(error, "rank 1 (impostor)") && has(error, what)) << what << ": " << error;
  }
}

// What was sent in another way cannot be given back.
TEST(Lending, ReadWithoutHavingBeenLent) {
  const Schedule swap = swap_all_reduce();
  Victim victim(true);
  Impostor impostor = victim.impostor(Lane::kCollective);
  const Rings rings;
  impostor.share(rings.fd());
  const Job job(swap, Kind::kAllReduce, 2, kCount, 1);
  const Pending pending = victim.post(job);
  FrameHeader header = data_frame(victim.call(), kBytes, 0, 4);
  header.type = FrameType::kPulled;
  impostor.send(header);
  EXPECT_TRUE(has(pending.wait(5s), "memory it was not lent")) << pending.wait();
}

// Over a network there is no memory to lend.
TEST(Lending, OverTcp) {
  Victim victim;
  Impostor impostor = victim.impostor(Lane::kCollective);
  const Job job = to_zero(kCount);
  const Pending pending = victim.post(job);
  const std::vector<uint8_t> memory(kBytes);
  say_where(impostor, data_frame(victim.call(), kBytes, 0, kBytes), address_of(memory.data()));
  EXPECT_TRUE(has(pending.wait(5s), "sent bytes that are no frame")) << pending.wait();
}

// All send to all in one step, each adding in an order of its own: nobody may wait for another to have read.
TEST(Pulling, RanksThatWaitForEachOther) {
  Ranks ranks(3, {true, 30s});
  Schedule cyclic{"cyclic", 1, {}};
  for (const uint32_t distance : {1u, 2u}) {
    for (uint32_t rank = 0; rank < 3; ++rank) {
      cyclic.transfers.push_back({0, rank, (rank + distance) % 3, 0, 1, true});
    }
  }
  for (uint32_t round = 0; round < 5; ++round) {
    const Job job(cyclic, Kind::kAllReduce, 3, kCount + round, round);
    std::vector<Pending> pending;
    for (uint32_t rank = 0; rank < 3; ++rank) pending.push_back(ranks.post(rank, job.operation(rank)));
    for (const Pending& entry : pending) ASSERT_EQ(entry.wait(), "");
    EXPECT_TRUE(job.right());
  }
}

}  // namespace
}  // namespace paceline::testing
