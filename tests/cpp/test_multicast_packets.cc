// What multicast does without sockets and threads: packets as bytes, tags, where chunks go, when packets may go.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <set>
#include <vector>

#include "transport/multicast/authentication.h"
#include "transport/multicast/packet.h"
#include "transport/multicast/placement.h"
#include "transport/multicast/sender.h"

namespace paceline {
namespace {

std::vector<uint8_t> packet(const PacketHeader& header) {
  std::vector<uint8_t> bytes(kPacketHeaderBytes);
  encode(header, std::span<uint8_t, kPacketHeaderBytes>(bytes.data(), kPacketHeaderBytes));
  bytes.resize(kPacketOverheadBytes + header.payload_bytes());
  return bytes;
}

PacketHeader some_header() {
  PacketHeader header;
  header.group_mark = 0x04030201;
  header.source = 3;
  header.chunk = 2;
  header.transfer = 0x0807060504030201;
  header.chunks = {2 * 100 + 7, 100};
  header.salt = 0x1817161514131211;
  header.counter = 0x24232221;
  return header;
}

TEST(MulticastPacket, RoundTripOfRandomHeaders) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 10000; ++i) {
    PacketHeader sent;
    sent.group_mark = static_cast<uint32_t>(random());
    sent.source = static_cast<uint32_t>(random());
    sent.transfer = random();
    sent.chunks.size = 1 + static_cast<uint32_t>(random() % kMaxChunkBytes);
    sent.chunks.total = 1 + random() % (uint64_t{sent.chunks.size} << (random() % 32));
    sent.chunk = static_cast<uint32_t>(random() % sent.chunks.count());
    sent.salt = random();
    sent.counter = static_cast<uint32_t>(random());
    PacketHeader got;
    ASSERT_TRUE(decode(packet(sent), &got));
    EXPECT_EQ(got.group_mark, sent.group_mark);
    EXPECT_EQ(got.source, sent.source);
    EXPECT_EQ(got.chunk, sent.chunk);
    EXPECT_EQ(got.transfer, sent.transfer);
    EXPECT_EQ(got.chunks, sent.chunks);
    EXPECT_EQ(got.salt, sent.salt);
    EXPECT_EQ(got.counter, sent.counter);
  }
}

TEST(MulticastPacket, LittleEndianOnTheWire) {
  const std::vector<uint8_t> bytes = packet(some_header());
  const std::vector<uint8_t> header(bytes.begin(), bytes.begin() + kPacketHeaderBytes);
  EXPECT_EQ(header, (std::vector<uint8_t>{'P',  'm',  1,    0,    1,    2,    3,    4,    3,    0,    0,    0,
                                          2,    0,    0,    0,    1,    2,    3,    4,    5,    6,    7,    8,
                                          207,  0,    0,    0,    0,    0,    0,    0,    0x11, 0x12, 0x13, 0x14,
                                          0x15, 0x16, 0x17, 0x18, 0x21, 0x22, 0x23, 0x24, 100,  0,    7,    0}));
}

TEST(MulticastPacket, RejectsWhatIsNoPacket) {
  const std::vector<uint8_t> whole = packet(some_header());
  PacketHeader got;
  ASSERT_TRUE(decode(whole, &got));
  for (const size_t at : {0, 1, 2, 3, 12, 24, 44, 46}) {  // not a packet, no such chunk, other sizes
    std::vector<uint8_t> broken = whole;
    broken[at] ^= 0x20;
    EXPECT_FALSE(decode(broken, &got)) << at;
  }
  for (size_t size = 0; size < whole.size(); ++size) EXPECT_FALSE(decode(std::span(whole).first(size), &got)) << size;
  std::vector<uint8_t> longer = whole;
  longer.push_back(0);
  EXPECT_FALSE(decode(longer, &got));
  std::vector<uint8_t> no_size = whole;
  no_size[44] = 0;
  EXPECT_FALSE(decode(no_size, &got));
  std::vector<uint8_t> uncountable = whole;
  std::fill_n(uncountable.begin() + 24, 8, uint8_t{0xff});
  EXPECT_FALSE(decode(uncountable, &got));
}

TEST(MulticastPacket, TransfersAreCutIntoChunks) {
  EXPECT_EQ((Chunks{0, 10}).count(), 0U);
  EXPECT_EQ((Chunks{1, 10}).count(), 1U);
  EXPECT_EQ((Chunks{10, 10}).count(), 1U);
  EXPECT_EQ((Chunks{11, 10}).count(), 2U);
  EXPECT_EQ((Chunks{11, 10}).length(0), 10U);
  EXPECT_EQ((Chunks{11, 10}).length(1), 1U);
  EXPECT_EQ((Chunks{20, 10}).length(1), 10U);
  EXPECT_TRUE((Chunks{uint64_t{10} << 32, 10}).can_be_numbered());
  EXPECT_FALSE((Chunks{(uint64_t{10} << 32) + 1, 10}).can_be_numbered());
  EXPECT_FALSE((Chunks{UINT64_MAX, 10}).can_be_numbered());
}

// Made by OpenSSL's own GMAC of the same 53 bytes, with bytes 32 to 43 as the nonce.
TEST(MulticastAuthentication, TagsAreGmac) {
  PacketKey key;
  for (uint8_t i = 0; i < key.size(); ++i) key[i] = i;
  std::vector<uint8_t> text;
  for (int i = 0; i < 53; ++i) text.push_back(static_cast<uint8_t>(7 * i + 1));
  const Tag right = {0x9a, 0x11, 0x8f, 0x66, 0x3f, 0x1c, 0xe1, 0xe2, 0xad, 0x70, 0x79, 0x9f, 0x9b, 0xf8, 0xd6, 0xc1};
  Authenticator authenticator(key);
  const std::span<const uint8_t> whole(text);
  EXPECT_EQ(authenticator.tag(whole.first(kPacketHeaderBytes), whole.subspan(kPacketHeaderBytes)), right);
  EXPECT_EQ(authenticator.tag(whole, {}), right);
  std::vector<uint8_t> signed_text = text;
  signed_text.insert(signed_text.end(), right.begin(), right.end());
  EXPECT_TRUE(authenticator.genuine(signed_text));
  for (size_t i = 0; i < 8 * signed_text.size(); ++i) {
    std::vector<uint8_t> other = signed_text;
    other[i / 8] ^= static_cast<uint8_t>(1 << i % 8);
    EXPECT_FALSE(authenticator.genuine(other)) << "bit " << i;
  }
}

TEST(MulticastAuthentication, KeysAreOneSendersInOneGroup) {
  Secret secret{};
  GroupId group{};
  const PacketKey key = packet_key(secret, group, 1);
  EXPECT_EQ(key, packet_key(secret, group, 1));
  EXPECT_NE(key, packet_key(secret, group, 2));
  const uint32_t mark = group_mark(secret, group);
  group[15] = 1;
  EXPECT_NE(key, packet_key(secret, group, 1));
  EXPECT_NE(mark, group_mark(secret, group));
  group[15] = 0;
  secret[31] = 1;
  EXPECT_NE(key, packet_key(secret, group, 1));
}

TEST(MulticastAuthentication, NoncesDoNotComeAgain) {
  std::set<std::pair<uint64_t, uint32_t>> seen;
  std::set<uint64_t> salts;
  for (int sender = 0; sender < 10; ++sender) {
    Nonces nonces;
    for (int i = 0; i < 1000; ++i) {
      PacketHeader header;
      nonces.next(&header);
      EXPECT_TRUE(seen.emplace(header.salt, header.counter).second);
      salts.insert(header.salt);
    }
  }
  EXPECT_EQ(salts.size(), 10U);
}

// Against a byte a byte: pieces of any length, whole chunks, in any order and more than once.
TEST(MulticastPlacement, AnyOrderAnyPieces) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 300; ++round) {
    const Chunks chunks{1 + random() % 5000, 1 + static_cast<uint32_t>(random() % 60)};
    std::vector<uint8_t> from(chunks.total);
    for (uint8_t& byte : from) byte = static_cast<uint8_t>(1 + random() % 255);
    constexpr size_t kMargin = 16;
    std::vector<uint8_t> to(chunks.total + 2 * kMargin);
    Placement placement(to.data() + kMargin, chunks);
    std::vector<bool> there(chunks.total);  // by byte, without chunks
    const auto has = [&](uint64_t chunk) {
      const auto begin = there.begin() + static_cast<std::ptrdiff_t>(chunks.offset(chunk));
      return std::all_of(begin, begin + chunks.length(chunk), [](bool byte) { return byte; });
    };
    for (int step = 0; !placement.complete(); ++step) {
      if (random() % 2 == 0) {
        const uint64_t chunk = random() % chunks.count();
        const bool is_new = !has(chunk);
        EXPECT_EQ(placement.place_chunk(chunk, from.data() + chunks.offset(chunk)), is_new);
        for (uint32_t i = 0; i < chunks.length(chunk); ++i) there[chunks.offset(chunk) + i] = true;
      } else {
        const uint64_t offset = random() % chunks.total;
        const uint64_t length = std::min(random() % 150, chunks.total - offset);
        placement.place(offset, std::span(from).subspan(offset, length));
        for (uint64_t i = 0; i < length; ++i) there[offset + i] = true;
      }
      std::vector<Range> gaps;
      for (uint64_t chunk = 0; chunk < chunks.count(); ++chunk) {
        if (has(chunk)) continue;
        if (gaps.empty() || gaps.back().offset + gaps.back().bytes != chunks.offset(chunk)) {
          gaps.push_back({chunks.offset(chunk), 0});
        }
        gaps.back().bytes += chunks.length(chunk);
      }
      ASSERT_EQ(placement.missing(SIZE_MAX), gaps);
      ASSERT_EQ(placement.complete(), gaps.empty());
      gaps.resize(std::min<size_t>(gaps.size(), 2));
      ASSERT_EQ(placement.missing(2), gaps);
    }
    EXPECT_TRUE(std::equal(from.begin(), from.end(), to.begin() + kMargin));
    const auto zero = [](uint8_t byte) { return byte == 0; };
    EXPECT_TRUE(std::all_of(to.begin(), to.begin() + kMargin, zero));
    EXPECT_TRUE(std::all_of(to.end() - kMargin, to.end(), zero));
  }
}

TEST(MulticastPlacement, ChunksThatAreThereAreLeftAlone) {
  std::vector<uint8_t> to(20);
  Placement placement(to.data(), {20, 10});
  const std::vector<uint8_t> first(20, 1);
  const std::vector<uint8_t> second(20, 2);
  EXPECT_TRUE(placement.place_chunk(0, first.data()));
  EXPECT_FALSE(placement.place_chunk(0, second.data()));
  placement.place(0, second);
  EXPECT_TRUE(placement.complete());
  EXPECT_TRUE(std::all_of(to.begin(), to.begin() + 10, [](uint8_t byte) { return byte == 1; }));
  EXPECT_TRUE(std::all_of(to.begin() + 10, to.end(), [](uint8_t byte) { return byte == 2; }));
}

TEST(MulticastPacing, BurstsAreAMillisecond) {
  Pacer pacer;
  EXPECT_EQ(pacer.burst(1500, 44), 44U);  // no limit
  pacer.set_rate(15'000'000, Pacer::Clock::time_point());
  EXPECT_EQ(pacer.burst(1500, 44), 10U);
  pacer.set_rate(1'000'000'000, Pacer::Clock::time_point());
  EXPECT_EQ(pacer.burst(1500, 44), 44U);
  pacer.set_rate(1, Pacer::Clock::time_point());
  EXPECT_EQ(pacer.burst(1500, 44), 1U);
}

TEST(MulticastPacing, NoMoreThanTheRate) {
  using std::chrono::milliseconds;
  Pacer pacer;
  Pacer::Clock::time_point now{std::chrono::hours(1)};
  pacer.set_rate(1'000'000, now);
  pacer.begin(now);
  const Pacer::Clock::time_point begin = now;
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(pacer.next(), begin + milliseconds(i));
    now = pacer.next();
    pacer.spend(1000, now);
  }
  // A sleep that was one millisecond too long is made up for, a long one only in part.
  pacer.spend(1000, now + milliseconds(2));
  EXPECT_EQ(pacer.next(), begin + milliseconds(101));
  now += milliseconds(1000);
  pacer.spend(1000, now);
  EXPECT_LT(pacer.next(), now);
  EXPECT_GT(pacer.next(), now - milliseconds(10));
  // Time without anything to send is not saved up.
  now += milliseconds(1000);
  pacer.begin(now);
  EXPECT_EQ(pacer.next(), now);
  // After a very low rate it goes on at once.
  pacer.set_rate(1, now);
  pacer.spend(1'000'000, now);
  EXPECT_GT(pacer.next(), now + std::chrono::hours(200));
  pacer.set_rate(1'000'000, now);
  EXPECT_EQ(pacer.next(), now);
}

}  // namespace
}  // namespace paceline
