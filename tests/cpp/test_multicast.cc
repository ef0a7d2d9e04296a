// Multicast over real sockets, on the loopback interface: what comes, what does not, and what must change nothing.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "multicast_ranks.h"
#include "transport/multicast/authentication.h"
#include "transport/multicast/multicast.h"
#include "transport/multicast/packet.h"
#include "transport/multicast/sockets.h"

namespace paceline {
namespace {

using namespace testing;
using std::chrono::milliseconds;

// Packets as a member of the group, or somebody who would like to be one, sends them.
class Forger {
 public:
  explicit Forger(const MulticastSettings& settings)
      : settings_(settings),
        socket_(open_sending(find_route(settings.group, settings.port, settings.interface_address), false)),
        authenticator_(packet_key(settings.secret, settings.group_id, settings.rank)) {}

  PacketHeader header(uint64_t transfer, uint64_t total, uint32_t chunk_bytes) const {
    PacketHeader header;
    header.group_mark = group_mark(settings_.secret, settings_.group_id);
    header.source = settings_.rank;
    header.transfer = transfer;
    header.chunks = {total, chunk_bytes};
    return header;
  }
  std::vector<uint8_t> packet(PacketHeader header, const uint8_t* from) {
    nonces_.next(&header);
    std::vector<uint8_t> bytes(kPacketHeaderBytes);
    encode(header, std::span<uint8_t, kPacketHeaderBytes>(bytes.data(), kPacketHeaderBytes));
    const uint8_t* const payload = from + header.chunks.offset(header.chunk);
    bytes.insert(bytes.end(), payload, payload + header.payload_bytes());
    const Tag tag = authenticator_.tag(bytes, {});
    bytes.insert(bytes.end(), tag.begin(), tag.end());
    return bytes;
  }
  void send(const std::vector<uint8_t>& bytes) {
    ASSERT_EQ(::send(socket_.get(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  }

 private:
  MulticastSettings settings_;
  Fd socket_;
  Authenticator authenticator_;
  Nonces nonces_;
};

TEST(Multicast, EverySizeArrives) {
  Rank sender(some_settings(0, 3));
  Rank receiver(some_settings(1, 3));
  Rank other(some_settings(2, 3));
  const size_t chunk = sender->chunk_bytes();
  uint64_t transfer = 1000;
  for (const size_t size :
       {size_t{0}, size_t{1}, chunk - 1, chunk, chunk + 1, 44 * chunk, 45 * chunk + 7, size_t{1} << 20}) {
    const std::vector<uint8_t> from = some_bytes(size);
    Destination to(size);
    Destination to_other(size);
    ++transfer;
    receiver->arm(transfer, 0, to.data(), size, kNever);
    other->arm(transfer, 0, to_other.data(), size, kNever);
    sender->send(transfer, from.data(), size);
    sender.await(transfer, Kind::kSent);
    receiver.await(transfer, Kind::kComplete);
    other.await(transfer, Kind::kComplete);
    EXPECT_TRUE(receiver->missing(transfer, 10).empty());
    receiver->disarm(transfer);
    other->disarm(transfer);
    EXPECT_TRUE(to.holds(from)) << size;
    EXPECT_TRUE(to_other.holds(from)) << size;
  }
  const Multicast::Counters sent = sender->counters();
  const Multicast::Counters got = receiver->counters();
  EXPECT_EQ(got.packets_received, sent.packets_sent);
  EXPECT_EQ(sent.bytes_sent, got.bytes_received + sent.packets_sent * (14 + 20 + 8 + kPacketOverheadBytes));
  EXPECT_EQ(got.malformed + got.forged + got.stale + got.mismatched + got.duplicate + got.overflowed, 0U);
  EXPECT_EQ(sender->counters().packets_received, 0U);  // its own
}

TEST(Multicast, AllRanksSendAtOnce) {
  constexpr uint32_t kRanks = 4;
  const size_t size = 300'001;
  std::vector<std::vector<uint8_t>> from;
  std::vector<std::vector<Destination>> to(kRanks);
  std::deque<Rank> ranks;
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back(some_settings(rank, kRanks));
    from.push_back(some_bytes(size + rank));
    for (uint32_t source = 0; source < kRanks; ++source) to[rank].emplace_back(size + source);
  }
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    for (uint32_t source = 0; source < kRanks; ++source) {
      if (source != rank) ranks[rank]->arm(source, source, to[rank][source].data(), size + source, kQuietAfter);
    }
  }
  for (uint32_t rank = 0; rank < kRanks; ++rank) ranks[rank]->send(rank, from[rank].data(), from[rank].size());
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    for (uint32_t source = 0; source < kRanks; ++source) {
      if (source == rank) continue;
      repair(ranks[source], ranks[rank], source, from[source]);
      ranks[rank]->disarm(source);
      EXPECT_TRUE(to[rank][source].holds(from[source]));
    }
  }
}

struct Loss {
  const char* name;
  // Whether the n-th packet that comes is lost; `chunk` and `count` are those of its transfer.
  bool (*loses)(uint64_t n, uint64_t chunk, uint64_t count);
};

bool by_chance(uint64_t n, unsigned percent) { return std::mt19937(static_cast<unsigned>(n))() % 100 < percent; }

class MulticastLoss : public ::testing::TestWithParam<Loss> {};

TEST_P(MulticastLoss, IsRepairedByWhatIsSentAgain) {
  MulticastSettings settings = some_settings(1, 2);
  uint64_t packets = 0;
  settings.receive_filter = [&packets](std::span<const uint8_t> packet) {
    PacketHeader header;
    if (!decode(packet, &header)) return true;
    return !GetParam().loses(packets++, header.chunk, header.chunks.count());
  };
  const std::vector<uint8_t> from = some_bytes(1'000'003);
  Rank sender(some_settings(0, 2));
  Rank receiver(settings);
  Destination to(from.size());
  receiver->arm(1, 0, to.data(), from.size(), kQuietAfter);
  sender->send(1, from.data(), from.size());
  repair(sender, receiver, 1, from);
  receiver->disarm(1);
  EXPECT_TRUE(to.holds(from));
  EXPECT_EQ(receiver->counters().bytes_received, from.size());
}

INSTANTIATE_TEST_SUITE_P(
    Every, MulticastLoss,
    ::testing::Values(Loss{"none", [](uint64_t, uint64_t, uint64_t) { return false; }},
                      Loss{"one_percent", [](uint64_t n, uint64_t, uint64_t) { return by_chance(n, 1); }},
                      Loss{"ten_percent", [](uint64_t n, uint64_t, uint64_t) { return by_chance(n, 10); }},
                      Loss{"thirty_percent", [](uint64_t n, uint64_t, uint64_t) { return by_chance(n, 30); }},
                      Loss{"bursts", [](uint64_t n, uint64_t, uint64_t) { return n / 50 % 3 == 0; }},
                      Loss{"first", [](uint64_t n, uint64_t chunk, uint64_t) { return chunk == 0 && n < 713; }},
                      Loss{"tail",
                           [](uint64_t n, uint64_t chunk, uint64_t count) { return chunk + 1 == count && n < 713; }},
                      Loss{"all_at_first", [](uint64_t n, uint64_t, uint64_t) { return n < 2000; }}),
    [](const auto& tested) { return tested.param.name; });

TEST(Multicast, WhatIsLostComesByAnotherWay) {
  MulticastSettings settings = some_settings(1, 2);
  settings.receive_filter = [](std::span<const uint8_t>) { return false; };
  const std::vector<uint8_t> from = some_bytes(700'001);
  Rank sender(some_settings(0, 2));
  Rank receiver(settings);
  Destination to(from.size());
  receiver->arm(1, 0, to.data(), from.size(), kQuietAfter);
  sender->send(1, from.data(), from.size());
  receiver.await(1, Kind::kQuiet);
  EXPECT_EQ(receiver->missing(1, 10), (std::vector<Range>{{0, from.size()}}));
  constexpr uint64_t kPiece = 100'000;  // no multiple of a chunk, and the last one is shorter
  for (uint64_t at = 0; at < from.size(); at += kPiece) {
    const uint64_t length = std::min<uint64_t>(kPiece, from.size() - at);
    EXPECT_EQ(receiver->place(1, at, from.data() + at, length), at + length == from.size());
  }
  EXPECT_FALSE(receiver.has(1, Kind::kComplete));
  receiver->disarm(1);
  EXPECT_TRUE(to.holds(from));
}

TEST(Multicast, BytesByTwoWaysAtOnce) {
  Rank sender(some_settings(0, 2));
  Rank receiver(some_settings(1, 2));
  const std::vector<uint8_t> from = some_bytes(3'000'001);
  for (uint64_t transfer = 1; transfer <= 10; ++transfer) {
    Destination to(from.size());
    receiver->arm(transfer, 0, to.data(), from.size(), kQuietAfter);
    sender->send(transfer, from.data(), from.size());
    bool complete = false;
    for (uint64_t end = from.size(); end > 0 && !complete;) {  // from behind
      const uint64_t begin = end > 65'537 ? end - 65'537 : 0;
      complete = receiver->place(transfer, begin, from.data() + begin, end - begin);
      end = begin;
    }
    EXPECT_TRUE(complete);
    receiver->disarm(transfer);
    sender->cancel(transfer);
    EXPECT_TRUE(to.holds(from));
  }
}

TEST(Multicast, OnlyWhatIsArmedIsPlaced) {
  Rank receiver(some_settings(1, 2));
  const std::vector<uint8_t> from(100, 1);
  Destination to(from.size());
  EXPECT_FALSE(receiver->place(1, 0, from.data(), from.size()));
  EXPECT_TRUE(receiver->missing(1, 10).empty());
  receiver->disarm(1);
  receiver->arm(1, 0, to.data(), from.size(), kNever);
  EXPECT_THROW(receiver->arm(1, 0, to.data(), from.size(), kNever), std::invalid_argument);
  for (const uint32_t source : {1U, 2U}) {
    EXPECT_THROW(receiver->arm(2, source, to.data(), from.size(), kNever), std::invalid_argument);
  }
  EXPECT_THROW(receiver->arm(3, 0, to.data(), UINT64_MAX, kNever), std::invalid_argument);
  EXPECT_FALSE(receiver->place(1, 1, from.data(), from.size()));
  EXPECT_FALSE(receiver->place(1, UINT64_MAX, from.data(), 2));
  EXPECT_FALSE(receiver->place(2, 0, from.data(), from.size()));
  EXPECT_TRUE(to.untouched());
  EXPECT_TRUE(receiver->place(1, 0, from.data(), from.size()));
  receiver->disarm(1);
  EXPECT_FALSE(receiver->place(1, 0, from.data(), from.size()));
  EXPECT_TRUE(to.holds(from));
}

TEST(Multicast, DuplicatesReversalAndReplay) {
  Rank receiver(some_settings(1, 2));
  Forger source(some_settings(0, 2));
  const size_t chunk = receiver->chunk_bytes();
  const std::vector<uint8_t> from = some_bytes(20 * chunk + 5);
  Destination to(from.size());
  std::vector<std::vector<uint8_t>> packets;
  PacketHeader header = source.header(1, from.size(), static_cast<uint32_t>(chunk));
  for (; header.chunk < header.chunks.count(); ++header.chunk) packets.push_back(source.packet(header, from.data()));
  receiver->arm(1, 0, to.data(), from.size(), kNever);
  for (auto packet = packets.rbegin(); packet != packets.rend(); ++packet) {
    source.send(*packet);
    source.send(*packet);
  }
  receiver.await(1, Kind::kComplete);
  EXPECT_EQ(receiver.await_packets(42).duplicate, 21U);
  EXPECT_TRUE(to.holds(from));
  receiver->disarm(1);
  // Somebody sends again what was recorded, when another transfer is under way.
  Destination later(from.size());
  receiver->arm(2, 0, later.data(), from.size(), kNever);
  for (const auto& packet : packets) source.send(packet);
  EXPECT_EQ(receiver.await_packets(63).stale, 21U);
  EXPECT_TRUE(later.untouched());
  receiver->disarm(2);
}

TEST(Multicast, WhatDoesNotFitChangesNothing) {
  Rank receiver(some_settings(1, 3));
  MulticastSettings stranger_settings = some_settings(0, 3);
  stranger_settings.secret[0] ^= 1;
  MulticastSettings outsider_settings = some_settings(3, 4);
  Forger source(some_settings(0, 3));
  Forger member(some_settings(2, 3));
  Forger stranger(stranger_settings);
  Forger outsider(outsider_settings);
  const auto chunk = receiver->chunk_bytes();
  const std::vector<uint8_t> from = some_bytes(3 * chunk);
  Destination to(2 * chunk);
  receiver->arm(1, 0, to.data(), 2 * chunk, kNever);
  const PacketHeader right = source.header(1, 2 * chunk, chunk);

  // The key of another secret, with the mark of this group.
  source.send(stranger.packet(right, from.data()));
  // A member that says it is another one; the mark of another group; a rank that is none.
  source.send(member.packet(right, from.data()));
  PacketHeader header = right;
  header.group_mark ^= 1;
  source.send(source.packet(header, from.data()));
  source.send(outsider.packet(outsider.header(1, 2 * chunk, chunk), from.data()));
  // Changed on the way: chunk, payload, tag, transfer.
  std::vector<uint8_t> packet = source.packet(right, from.data());
  for (const size_t at : {size_t{12}, kPacketHeaderBytes, packet.size() - 1, size_t{16}}) {
    std::vector<uint8_t> changed = packet;
    changed[at] ^= 1;
    source.send(changed);
  }
  // Too short, too long, nothing at all.
  packet.pop_back();
  source.send(packet);
  packet.resize(packet.size() + 2);
  source.send(packet);
  source.send({});
  // A member that sends what is another one's to send; lengths other than what was armed.
  source.send(member.packet(member.header(1, 2 * chunk, chunk), from.data()));
  header = source.header(1, 3 * chunk, chunk);
  header.chunk = 2;
  source.send(source.packet(header, from.data()));
  source.send(source.packet(source.header(1, chunk, chunk), from.data()));
  source.send(source.packet(source.header(1, 2 * chunk, chunk - 1), from.data()));

  const Multicast::Counters counters = receiver.await_packets(15);
  EXPECT_EQ(counters.forged, 6U);
  EXPECT_EQ(counters.malformed, 5U);
  EXPECT_EQ(counters.mismatched, 4U);
  EXPECT_EQ(counters.bytes_received, 0U);
  EXPECT_TRUE(to.untouched());
  EXPECT_EQ(receiver->missing(1, 10), (std::vector<Range>{{0, 2 * chunk}}));

  for (header = right; header.chunk < 2; ++header.chunk) source.send(source.packet(header, from.data()));
  receiver.await(1, Kind::kComplete);
  receiver->disarm(1);
  EXPECT_TRUE(to.holds({from.begin(), from.begin() + 2 * chunk}));
}

TEST(Multicast, ForgedPacketsBesideATransfer) {
  const std::vector<uint8_t> from = some_bytes(1'000'000);
  Rank sender(some_settings(0, 2));
  Rank receiver(some_settings(1, 2));
  MulticastSettings stranger_settings = some_settings(0, 2);
  stranger_settings.secret[0] ^= 1;
  const std::vector<uint8_t> wrong(from.size(), 0xee);
  Destination to(from.size());
  receiver->arm(1, 0, to.data(), from.size(), kQuietAfter);
  std::atomic<bool> over{false};
  std::thread forging([&] {
    Forger stranger(stranger_settings);
    PacketHeader header = Forger(some_settings(0, 2)).header(1, from.size(), receiver->chunk_bytes());
    while (!over) {
      stranger.send(stranger.packet(header, wrong.data()));
      header.chunk = static_cast<uint32_t>((header.chunk + 1) % header.chunks.count());
    }
  });
  receiver.await_packets(100);
  sender->send(1, from.data(), from.size());
  repair(sender, receiver, 1, from);
  over = true;
  forging.join();
  receiver->disarm(1);
  EXPECT_TRUE(to.holds(from));
  EXPECT_GE(receiver->counters().forged, 100U);
}

TEST(Multicast, GroupsAtOneAddressDoNotMix) {
  MulticastSettings other_settings = some_settings(1, 2);
  other_settings.group_id[0] ^= 1;
  const std::vector<uint8_t> from = some_bytes(1000);
  Rank sender(some_settings(0, 2));
  Rank receiver(some_settings(1, 2));
  Rank other(other_settings);
  Destination to(from.size());
  Destination to_other(from.size());
  receiver->arm(1, 0, to.data(), from.size(), kNever);
  other->arm(1, 0, to_other.data(), from.size(), kNever);
  sender->send(1, from.data(), from.size());
  receiver.await(1, Kind::kComplete);
  EXPECT_EQ(other.await_packets(1).malformed, 1U);
  receiver->disarm(1);
  other->disarm(1);
  EXPECT_TRUE(to.holds(from));
  EXPECT_TRUE(to_other.untouched());
}

// Memory goes back to the system as soon as disarm() has returned.
TEST(Multicast, DisarmedWhilePacketsFly) {
  Rank sender(some_settings(0, 2));
  Rank receiver(some_settings(1, 2));
  const std::vector<uint8_t> from = some_bytes(500'000);
  std::mt19937 random(3);
  for (uint64_t transfer = 1; transfer <= 100; ++transfer) {
    auto to = std::make_unique<uint8_t[]>(from.size());
    receiver->arm(transfer, 0, to.get(), from.size(), kNever);
    sender->send(transfer, from.data(), from.size());
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 1000));
    receiver->disarm(transfer);
    to.reset();
    if (random() % 2 == 0) {
      sender->cancel(transfer);
    } else {
      sender.await(transfer, Kind::kSent);
    }
  }
  EXPECT_EQ(receiver->failure(), "");
  EXPECT_EQ(sender->failure(), "");
}

TEST(Multicast, SmallestReceiveBuffer) {
  for (const bool merge : {true, false}) {
    MulticastSettings settings = some_settings(1, 2);
    settings.receive_buffer_bytes = 1;
    settings.merge_packets = merge;
    MulticastSettings sending = some_settings(0, 2);
    sending.merge_packets = merge;
    const std::vector<uint8_t> from = some_bytes(300'000);
    Rank sender(sending);
    Rank receiver(settings);
    EXPECT_LT(receiver->receive_buffer_bytes(), 10'000U);
    Destination to(from.size());
    receiver->arm(1, 0, to.data(), from.size(), kQuietAfter);
    sender->send(1, from.data(), from.size());
    repair(sender, receiver, 1, from);
    receiver->disarm(1);
    EXPECT_TRUE(to.holds(from));
  }
}

TEST(Multicast, MergedOrNot) {
  for (const bool sends_merged : {true, false}) {
    for (const bool receives_merged : {true, false}) {
      MulticastSettings sending = some_settings(0, 2);
      sending.merge_packets = sends_merged;
      MulticastSettings receiving = some_settings(1, 2);
      receiving.merge_packets = receives_merged;
      const std::vector<uint8_t> from = some_bytes(500'001);
      Rank sender(sending);
      Rank receiver(receiving);
      EXPECT_TRUE(sends_merged || !sender->sends_merged());
      EXPECT_TRUE(receives_merged || !receiver->receives_merged());
      Destination to(from.size());
      receiver->arm(1, 0, to.data(), from.size(), kQuietAfter);
      sender->send(1, from.data(), from.size());
      repair(sender, receiver, 1, from);
      receiver->disarm(1);
      EXPECT_TRUE(to.holds(from));
    }
  }
}

TEST(Multicast, ChunksOfAnySizeThatRanksAgreeOn) {
  for (const uint32_t chunk : {1U, 3U, 100U, 8000U}) {
    MulticastSettings sending = some_settings(0, 2);
    MulticastSettings receiving = some_settings(1, 2);
    sending.chunk_bytes = receiving.chunk_bytes = chunk;
    const std::vector<uint8_t> from = some_bytes(100 * chunk + chunk / 2);
    Rank sender(sending);
    Rank receiver(receiving);
    EXPECT_EQ(receiver->chunk_bytes(), chunk);
    Destination to(from.size());
    receiver->arm(1, 0, to.data(), from.size(), kQuietAfter);
    sender->send(1, from.data(), from.size());
    repair(sender, receiver, 1, from);
    receiver->disarm(1);
    EXPECT_TRUE(to.holds(from));
  }
}

// Two hosts with a link between them: network namespaces of two threads, which keep theirs until they end. Everything
// of a host is to be done in `on`.
class Hosts {
 public:
  // False where this may not be made: without root, or without `ip`.
  bool make() {
    for (Host& host : hosts_) {
      bool made = false;
      host.run([&] { made = ::unshare(CLONE_NEWNET) == 0 && shell("ip link set lo up"); });
      if (!made) return false;
    }
    bool made = false;
    const std::string other =
        "/proc/" + std::to_string(::getpid()) + "/task/" + std::to_string(hosts_[1].id) + "/ns/net";
    hosts_[0].run([&] {
      made = shell("ip link add mc0 type veth peer name mc0 netns " + other) && shell("ip link set mc0 up") &&
             shell("ip addr add 198.18.77.1/24 dev mc0") && shell("ip addr add fd93::1/64 dev mc0 nodad");
    });
    hosts_[1].run([&] {
      made = made && shell("ip link set mc0 up") && shell("ip addr add 198.18.77.2/24 dev mc0") &&
             shell("ip addr add fd93::2/64 dev mc0 nodad");
    });
    return made;
  }
  void on(size_t host, const std::function<void()>& work) { hosts_[host].run(work); }

 private:
  // A thread that does what it is given.
  struct Host {
    Host() {
      thread = std::thread([this] {
        id = static_cast<pid_t>(::syscall(SYS_gettid));
        for (std::unique_lock lock(mutex); !over;) {
          if (work) std::exchange(work, nullptr)();
          changed.notify_all();
          changed.wait(lock, [this] { return work != nullptr || over; });
        }
      });
    }
    ~Host() {
      {
        const std::lock_guard lock(mutex);
        over = true;
      }
      changed.notify_all();
      thread.join();
    }
    void run(const std::function<void()>& given) {
      std::unique_lock lock(mutex);
      work = given;
      changed.notify_all();
      changed.wait(lock, [this] { return work == nullptr; });
    }

    std::mutex mutex;
    std::condition_variable changed;
    std::function<void()> work;
    bool over = false;
    pid_t id = 0;
    std::thread thread;
  };

  static bool shell(const std::string& command) { return std::system((command + " 2>/dev/null").c_str()) == 0; }

  std::array<Host, 2> hosts_;
};

TEST(Multicast, BetweenHosts) {
  Hosts hosts;
  if (!hosts.make()) GTEST_SKIP() << "no network namespaces here: they take root and iproute2";
  for (const char* group : {kIpv4Group, "ff15::93:7"}) {
    for (const bool merge : {true, false}) {
      const auto settings = [&](uint32_t rank) {
        MulticastSettings made = some_settings(rank, 3);
        made.group = group;
        made.interface_address = "mc0";
        made.others_on_host = rank != 2;  // 0 and 1 share a host
        made.merge_packets = merge;
        return made;
      };
      const std::vector<uint8_t> from = some_bytes(1'000'003);
      std::deque<Rank> ranks;
      for (uint32_t rank = 0; rank < 3; ++rank) hosts.on(rank / 2, [&] { ranks.emplace_back(settings(rank)); });
      EXPECT_EQ(ranks[0]->chunk_bytes(), group == std::string(kIpv4Group) ? 1408U : 1384U);
      for (uint32_t source : {0, 2}) {
        std::deque<Destination> to;
        for (uint32_t rank = 0; rank < 3; ++rank) {
          to.emplace_back(from.size());
          if (rank != source) ranks[rank]->arm(source, source, to[rank].data(), from.size(), kQuietAfter);
        }
        ranks[source]->send(source, from.data(), from.size());
        for (uint32_t rank = 0; rank < 3; ++rank) {
          if (rank == source) continue;
          repair(ranks[source], ranks[rank], source, from);
          ranks[rank]->disarm(source);
          EXPECT_TRUE(to[rank].holds(from)) << group << " from " << source << " to " << rank;
        }
      }
      EXPECT_EQ(ranks[0]->sends_merged(), merge);
    }
  }
}

TEST(Multicast, QuietAgainAndAgain) {
  Rank receiver(some_settings(1, 2));
  Destination to(100);
  Destination other(100);
  receiver->arm(1, 0, to.data(), 100, std::chrono::hours(1000));
  receiver->arm(2, 0, other.data(), 100, milliseconds(1));  // the thread is asleep for longer
  receiver.await(2, Kind::kQuiet);
  receiver.await(2, Kind::kQuiet);
  const std::vector<uint8_t> from(100, 1);
  EXPECT_FALSE(receiver->place(2, 0, from.data(), 50));
  receiver.await(2, Kind::kQuiet);
  EXPECT_FALSE(receiver.has(1, Kind::kQuiet));
}

TEST(Multicast, SentAgainOnce) {
  Rank sender(some_settings(0, 2));
  Rank receiver(some_settings(1, 2));
  const uint64_t chunk = sender->chunk_bytes();
  const std::vector<uint8_t> from = some_bytes(10 * chunk - 1);
  Destination to(from.size());
  receiver->arm(1, 0, to.data(), from.size(), kNever);
  // The last chunk, the third and fourth by their edges, and nothing.
  const std::vector<Range> ranges = {
      {from.size() - 1, UINT64_MAX}, {3 * chunk - 1, 2}, {2 * chunk, 1}, {from.size(), 10}, {5, 0},
      {UINT64_MAX, UINT64_MAX}};
  sender->send_again(1, from.data(), from.size(), ranges);
  sender.await(1, Kind::kSent);
  receiver.await_packets(3);
  EXPECT_EQ(sender->counters().packets_sent, 3U);
  EXPECT_EQ(receiver->missing(1, 10), (std::vector<Range>{{0, 2 * chunk}, {4 * chunk, 5 * chunk}}));
  EXPECT_EQ(receiver->missing(1, 1), (std::vector<Range>{{0, 2 * chunk}}));
  sender->send_again(1, from.data(), from.size(), {});
  sender.await(1, Kind::kSent);
  receiver->disarm(1);
}

// A transfer that would take hours is left for another that is to be sent again, and is forgotten when it is cancelled.
TEST(Multicast, RepairsGoFirstAndCancelledTransfersGoNoFurther) {
  const std::vector<uint8_t> from = some_bytes(100'000);
  Rank sender(some_settings(0, 2));
  Rank receiver(some_settings(1, 2));
  Destination slow(from.size());
  Destination fast(from.size());
  sender->set_rate(10);
  receiver->arm(1, 0, slow.data(), from.size(), kNever);
  receiver->arm(2, 0, fast.data(), from.size(), kQuietAfter);
  sender->send(1, from.data(), from.size());
  receiver.await_packets(1);
  sender->send_again(2, from.data(), from.size(), std::vector<Range>{{0, from.size()}});
  sender->set_rate(0);
  sender->cancel(3);
  repair(sender, receiver, 2, from);
  sender.await(1, Kind::kSent);
  receiver->disarm(1);

  sender->set_rate(10);
  receiver->arm(4, 0, slow.data(), from.size(), kNever);
  sender->send(4, from.data(), from.size());
  sender->send(5, from.data(), from.size());
  sender->cancel(5);
  sender->cancel(4);
  sender->set_rate(0);
  sender->send(6, from.data(), from.size());
  sender.await(6, Kind::kSent);
  EXPECT_FALSE(sender.has(4, Kind::kSent));
  EXPECT_FALSE(sender.has(5, Kind::kSent));
  receiver->disarm(4);
  receiver->disarm(2);
}

TEST(Multicast, EndsInTheMiddle) {
  const std::vector<uint8_t> from = some_bytes(10'000'000);
  Destination to(from.size());
  Rank receiver(some_settings(1, 2));
  receiver->arm(1, 0, to.data(), from.size(), kNever);
  Rank sender(some_settings(0, 2));
  sender->set_rate(100'000'000);
  sender->send(1, from.data(), from.size());
  receiver.await_packets(100);
  sender.end();
  receiver.end();
  EXPECT_FALSE(to.untouched());
}

TEST(Multicast, AThreadThatFailsSaysSo) {
  MulticastSettings settings = some_settings(1, 2);
  settings.receive_filter = [](std::span<const uint8_t>) -> bool { throw std::runtime_error("out of order"); };
  const std::vector<uint8_t> from(10);
  Rank sender(some_settings(0, 2));
  Rank receiver(settings);
  Destination to(10);
  receiver->arm(1, 0, to.data(), 10, kQuietAfter);
  sender->send(1, from.data(), 10);
  receiver.await(0, Kind::kFailed);
  EXPECT_NE(receiver->failure().find("receives"), std::string::npos);
  EXPECT_NE(receiver->failure().find("out of order"), std::string::npos);
  receiver->disarm(1);  // which waits for nobody
  EXPECT_TRUE(to.untouched());
}

TEST(Multicast, ForkedChildrenLeaveItAlone) {
  const std::vector<uint8_t> from = some_bytes(5000);
  Rank sender(some_settings(0, 2));
  Rank receiver(some_settings(1, 2));
  const pid_t child = ::fork();
  if (child == 0) {
    const int event_fd = receiver->event_fd();
    receiver->abandon_in_child();
    sender->abandon_in_child();
    receiver.end();
    sender.end();
    ::_exit(::fcntl(event_fd, F_GETFD) == -1 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  Destination to(from.size());
  receiver->arm(1, 0, to.data(), from.size(), kNever);
  sender->send(1, from.data(), from.size());
  receiver.await(1, Kind::kComplete);
  receiver->disarm(1);
  EXPECT_TRUE(to.holds(from));
}

std::string refusal(const MulticastSettings& settings) {
  try {
    Multicast::create(settings);
  } catch (const std::exception& thrown) {
    return thrown.what();
  }
  return "";
}

TEST(Multicast, RefusalsSayWhy) {
  const auto says = [](const std::string& text, const std::string& word) {
    return text.find(word) != std::string::npos;
  };
  for (const char* group : {"10.0.0.1", "fe80::1", "", "everybody"}) {
    MulticastSettings settings = some_settings(0, 2);
    settings.group = group;
    EXPECT_TRUE(says(refusal(settings), "is not the address of a multicast group")) << group;
  }
  for (const char* interface : {"198.19.255.254", "none0", "", "2001:db8::1"}) {
    MulticastSettings settings = some_settings(0, 2);
    settings.interface_address = interface;
    EXPECT_TRUE(says(refusal(settings), "no interface of this host")) << interface;
  }
  MulticastSettings settings = some_settings(0, 2);
  settings.chunk_bytes = 100'000;
  EXPECT_TRUE(says(refusal(settings), "MTU"));
  settings = some_settings(2, 2);
  EXPECT_TRUE(says(refusal(settings), "rank"));
  EXPECT_EQ(refusal(some_settings(1, 2)), "");
}

}  // namespace
}  // namespace paceline
