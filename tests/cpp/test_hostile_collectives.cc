// A peer that says the wrong thing while this rank waits in a collective. The group may fail, with a sentence; the
// process may not, and no operation may hang.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <functional>
#include <thread>

#include "victim.h"

namespace paceline::testing {
namespace {

using namespace std::chrono_literals;

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
      {"more than a frame may have",
       [](Impostor& i, const Rings& rings, const Call& call) {
         i.share(rings.fd());
         FrameHeader header = data_frame(call, 400000, 0, 400000);
         header.shared = true;
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

// A segment of the test's own, whose stream nobody reads but who it is shared with.
struct Speaker {
  Rings rings, unread;
  Speaker() { EXPECT_TRUE(rings.open(Fd(::dup(unread.fd())))); }
};

TEST(Collectives, StreamInMemory) {
  Victim victim(true);
  Impostor impostor = victim.impostor(Lane::kCollective);
  const Speaker speaker;
  impostor.share(speaker.rings.fd());
  impostor.speak_through(speaker.rings.stream());
  const Job job = to_zero(1000);
  const Pending pending = victim.post(job);
  impostor.send(data_frame(victim.call(), 4000, 0, 4000), random_bytes(4000, 1));
  EXPECT_EQ(pending.wait(5s), "");
}

TEST(Collectives, StreamsThatMakeNoSense) {
  using Say = std::function<void(Impostor&, const Speaker&)>;
  const auto switches = [](Impostor& i, const Speaker& speaker) {
    i.share(speaker.rings.fd());
    i.speak_through(speaker.rings.stream());
  };
  const std::vector<std::pair<const char*, Say>> says = {
      {"a stream before the segment",
       [](Impostor& i, const Speaker& speaker) { i.speak_through(speaker.rings.stream()); }},
      {"a stream twice",
       [&](Impostor& i, const Speaker& speaker) {
         switches(i, speaker);
         i.speak_through(speaker.rings.stream());
       }},
      {"bytes that are no frame",
       [&](Impostor& i, const Speaker& speaker) {
         switches(i, speaker);
         i.send(random_bytes(500, 3));
       }},
      {"more bytes than there are",
       [&](Impostor& i, const Speaker&) {
         Forgery forgery;
         i.share(forgery.fd());
         FrameHeader header;
         header.type = FrameType::kStream;
         i.send(header);
         forgery.write(kSent, uint64_t{1} << 40);
         ASSERT_EQ(::send(i.fd(), "!", 1, MSG_NOSIGNAL), 1);
       }},
      {"half a frame, and the end",
       [&](Impostor& i, const Speaker& speaker) {
         switches(i, speaker);
         i.send(std::vector<uint8_t>(30));
         i.shut();
       }},
  };
  for (const auto& [what, say] : says) {
    Victim victim(true);
    Impostor impostor = victim.impostor(Lane::kCollective);
    const Speaker speaker;
    const Job job = to_zero(1000);
    const Pending pending = victim.post(job);
    say(impostor, speaker);
    EXPECT_TRUE(has(pending.wait(5s), "rank 1 (impostor)")) << what << ": " << pending.wait();
  }
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

std::vector<std::string> open_files() {
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    files.push_back(std::filesystem::read_symlink(entry.path(), error).string());
  }
  return files;
}

size_t num_segments() {
  const std::vector<std::string> files = open_files();
  return static_cast<size_t>(
      std::count_if(files.begin(), files.end(), [](const auto& file) { return has(file, "memfd"); }));
}

// A segment stays open as memory, not as a file; and a second file that comes with it is not kept.
TEST(Collectives, FilesAreNotKept) {
  Victim victim(true);
  Impostor impostor = victim.impostor(Lane::kCollective);
  Rings rings;
  std::array<uint8_t, kFrameHeaderBytes> bytes;
  FrameHeader header;
  header.type = FrameType::kRings;
  encode(header, bytes);
  iovec part{bytes.data(), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<uint8_t, CMSG_SPACE(2 * sizeof(int))> space{};
  message.msg_control = space.data();
  message.msg_controllen = space.size();
  cmsghdr* control = CMSG_FIRSTHDR(&message);
  control->cmsg_level = SOL_SOCKET;
  control->cmsg_type = SCM_RIGHTS;
  control->cmsg_len = CMSG_LEN(2 * sizeof(int));
  const std::array<int, 2> files = {rings.fd(), rings.fd()};
  std::memcpy(CMSG_DATA(control), files.data(), sizeof(files));
  ASSERT_EQ(::sendmsg(impostor.fd(), &message, MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  const Job job = to_zero(1000);
  const Pending pending = victim.post(job);
  FrameHeader data = data_frame(victim.call(), 4000, 0, 4000);
  impostor.send(data, random_bytes(4000, 1));
  EXPECT_EQ(pending.wait(5s), "");
  EXPECT_EQ(num_segments(), 1u);  // the one of this test itself
}

// A rank that has no descriptor left for a segment says so to all, also to the rank whose segment it was.
TEST(Collectives, NoDescriptorForTheSegment) {
  Victim victim(true);
  Impostor impostor = victim.impostor(Lane::kCollective);
  const Rings rings;
  const Job job = to_zero(1000);
  const Pending pending = victim.post(job);
  std::vector<Fd> fillers;
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit before = limit;
  limit.rlim_cur = open_files().size() + 20;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  while (fillers.empty() || fillers.back()) fillers.emplace_back(::dup(0));
  impostor.share(rings.fd());
  std::vector<uint8_t> words;
  const auto last = impostor.receive_frame(&words);
  ::setrlimit(RLIMIT_NOFILE, &before);
  fillers.clear();
  ASSERT_TRUE(last) << "the end comes without a reason";
  EXPECT_EQ(last->type, FrameType::kError);
  EXPECT_TRUE(has(std::string(words.begin(), words.end()), "cannot go on: too many open files"))
      << std::string(words.begin(), words.end());
  EXPECT_TRUE(has(pending.wait(5s), "too many open files")) << pending.wait();
}

// What a member says about teams ends an operation of a team at most; the group goes on.
TEST(HostileTeams, EndNothingElse) {
  for (const bool shm : {false, true}) {
    Victim victim(shm);
    Impostor impostor = victim.impostor(Lane::kTeams);
    const Job job = to_zero(1000);
    const auto right = [&](uint64_t number) {
      const Pending pending = victim.post(job, 20s, number);
      FrameHeader header = data_frame(victim.call(), 4000, 0, 4000);
      header.seq = number;
      impostor.send(header, std::vector<uint8_t>(4000));
      return pending.wait(5s);
    };
    FrameHeader unknown = data_frame({}, 4000, 0, 4000);
    unknown.seq = kFirstOfTeams + 77;  // not called, and the group's own number
    impostor.send(unknown, std::vector<uint8_t>(4000));
    unknown.seq = 1;
    impostor.send(unknown, std::vector<uint8_t>(4000));
    FrameHeader called;
    called.type = FrameType::kPosted;
    for (uint64_t number : {uint64_t{0}, uint64_t{1}, kFirstOfTeams, UINT64_MAX}) {
      called.seq = number;
      impostor.send(called);
    }
    for (uint64_t i = 0; i < 20000; ++i) {
      called.seq = kFirstOfTeams + 1000 + i;
      impostor.send(called);
    }
    EXPECT_EQ(right(kFirstOfTeams + 1), "");

    const Pending spoiled = victim.post(job, 20s, kFirstOfTeams + 2);
    FrameHeader another = data_frame(victim.call(), 4000, 0, 4000);
    another.seq = kFirstOfTeams + 2;
    another.call.count = 7;
    impostor.send(another, std::vector<uint8_t>(4000));
    EXPECT_TRUE(has(spoiled.wait(5s), "rank 1 (impostor)") || has(spoiled.wait(5s), "rank 1 called")) << spoiled.wait();
    impostor.send(another, std::vector<uint8_t>(4000));  // too late
    EXPECT_EQ(right(kFirstOfTeams + 3), "");

    FrameHeader given_up;
    given_up.type = FrameType::kGivenUp;
    given_up.seq = kFirstOfTeams + 4;
    given_up.id = 99;
    given_up.length = 5;
    const std::vector<uint8_t> words = {'t', 'i', 'r', 'e', 'd'};
    impostor.send(given_up, words);
    std::this_thread::sleep_for(20ms);
    EXPECT_TRUE(has(right(kFirstOfTeams + 4), "tired (told by rank 1)"));
    EXPECT_EQ(right(kFirstOfTeams + 5), "");
    EXPECT_EQ(victim.failure(), "");

    FrameHeader at;
    at.type = FrameType::kAccept;
    impostor.send(at);
    EXPECT_TRUE(has(victim.fails(), "on the wrong connection"));
  }
}

}  // namespace
}  // namespace paceline::testing
