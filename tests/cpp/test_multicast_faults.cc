// Multicast where the kernel says no: for a moment, for good, to merged packets, or where libcrypto is missing.
//
// The linker sends the core's calls through the functions below (--wrap, see CMakeLists.txt).
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <string>

#include "multicast_ranks.h"

namespace {

// The next `times` calls fail.
struct Fault {
  std::atomic<int> times{0};
  std::atomic<int> error{0};

  void set(int number_of_times, int code) {
    error = code;
    times = number_of_times;
  }
  bool strikes() {
    int left = times;
    while (left > 0 && !times.compare_exchange_weak(left, left - 1)) {
    }
    if (left <= 0) return false;
    errno = error;
    return true;
  }
};

constexpr int kAlways = 1 << 30;

Fault sendmsg_fault, sendmmsg_fault, recvmmsg_fault, merging_fault;
std::atomic<bool> sends_one_by_one{false};
std::atomic<bool> has_libcrypto{true};
std::atomic<bool> has_all_functions{true};

}  // namespace

extern "C" {
ssize_t __real_sendmsg(int socket, const msghdr* message, int flags);
ssize_t __wrap_sendmsg(int socket, const msghdr* message, int flags) {
  return sendmsg_fault.strikes() ? -1 : __real_sendmsg(socket, message, flags);
}
int __real_sendmmsg(int socket, mmsghdr* messages, unsigned count, int flags);
int __wrap_sendmmsg(int socket, mmsghdr* messages, unsigned count, int flags) {
  return sendmmsg_fault.strikes() ? -1 : __real_sendmmsg(socket, messages, sends_one_by_one ? 1 : count, flags);
}
int __real_recvmmsg(int socket, mmsghdr* messages, unsigned count, int flags, timespec* timeout);
int __wrap_recvmmsg(int socket, mmsghdr* messages, unsigned count, int flags, timespec* timeout) {
  return recvmmsg_fault.strikes() ? -1 : __real_recvmmsg(socket, messages, count, flags, timeout);
}
int __real_setsockopt(int socket, int level, int option, const void* value, socklen_t length);
int __wrap_setsockopt(int socket, int level, int option, const void* value, socklen_t length) {
  if (level == IPPROTO_UDP && merging_fault.strikes()) return -1;
  return __real_setsockopt(socket, level, option, value, length);
}
void* __real_dlopen(const char* name, int flags);
void* __wrap_dlopen(const char* name, int flags) { return has_libcrypto ? __real_dlopen(name, flags) : nullptr; }
void* __real_dlsym(void* library, const char* name);
void* __wrap_dlsym(void* library, const char* name) {
  return has_all_functions ? __real_dlsym(library, name) : nullptr;
}
}

namespace paceline {
namespace {

using namespace testing;

std::string refusal() {
  try {
    Multicast::create(some_settings(0, 2));
  } catch (const std::runtime_error& thrown) {
    return thrown.what();
  }
  return "";
}

// The first test: what was found once is kept.
TEST(MulticastLibcrypto, ALibcryptoThatIsMissingIsNamed) {
  has_libcrypto = false;
  EXPECT_NE(refusal().find("libcrypto.so.3"), std::string::npos);
  has_libcrypto = true;
  has_all_functions = false;
  EXPECT_NE(refusal().find("libcrypto has no EVP_"), std::string::npos);
  has_all_functions = true;
  EXPECT_EQ(refusal(), "");
}

class MulticastFaults : public ::testing::Test {
 protected:
  void SetUp() override { ranks(true); }
  void TearDown() override {
    for (Fault* fault : {&sendmsg_fault, &sendmmsg_fault, &recvmmsg_fault, &merging_fault}) fault->set(0, 0);
    sends_one_by_one = false;
  }
  void ranks(bool merge) {
    MulticastSettings sending = some_settings(0, 2);
    sending.merge_packets = merge;
    sender_.reset();
    receiver_.reset();
    sender_ = std::make_unique<Rank>(sending);
    receiver_ = std::make_unique<Rank>(some_settings(1, 2));
  }
  Multicast& sender() { return **sender_; }
  Multicast& receiver() { return **receiver_; }

  // A transfer arrives, whatever is in its way.
  void transfer_arrives() {
    ++transfer_;
    Destination to(from_.size());
    receiver().arm(transfer_, 0, to.data(), from_.size(), kQuietAfter);
    sender().send(transfer_, from_.data(), from_.size());
    repair(*sender_, *receiver_, transfer_, from_);
    receiver().disarm(transfer_);
    EXPECT_TRUE(to.holds(from_));
  }

  const std::vector<uint8_t> from_ = some_bytes(500'001);
  std::unique_ptr<Rank> sender_, receiver_;
  uint64_t transfer_ = 0;
};

TEST_F(MulticastFaults, AnInterfaceThatCannotMerge) {
  for (const int error : {EIO, EINVAL, EMSGSIZE, EOPNOTSUPP}) {
    ranks(true);
    EXPECT_TRUE(sender().sends_merged());
    sendmsg_fault.set(1, error);
    transfer_arrives();
    EXPECT_FALSE(sender().sends_merged());
    EXPECT_EQ(sender().counters().packets_refused, 0U);
  }
}

TEST_F(MulticastFaults, AKernelThatCannotMerge) {
  merging_fault.set(kAlways, ENOPROTOOPT);
  ranks(true);
  EXPECT_FALSE(sender().sends_merged());
  EXPECT_FALSE(receiver().receives_merged());
  transfer_arrives();
}

TEST_F(MulticastFaults, MomentsWithoutRoom) {
  for (const bool merge : {true, false}) {
    ranks(merge);
    for (const int error : {EAGAIN, ENOBUFS, ENOMEM, EINTR}) {
      (merge ? sendmsg_fault : sendmmsg_fault).set(3, error);
      transfer_arrives();
    }
    EXPECT_EQ(sender().counters().packets_refused, 0U);
    EXPECT_EQ(sender().sends_merged(), merge);
  }
}

TEST_F(MulticastFaults, AKernelThatTakesSomePackets) {
  sends_one_by_one = true;
  ranks(false);
  transfer_arrives();
  const Multicast::Counters counters = sender().counters();
  EXPECT_EQ(counters.batches_sent, counters.packets_sent);
}

TEST_F(MulticastFaults, PacketsThatTheKernelRefusesAreLost) {
  for (const bool merge : {true, false}) {
    ranks(merge);
    for (const int error : {ENETUNREACH, ENETDOWN, EPERM, EHOSTUNREACH}) {
      const uint64_t refused = sender().counters().packets_refused;
      (merge ? sendmsg_fault : sendmmsg_fault).set(2, error);
      transfer_arrives();
      EXPECT_GT(sender().counters().packets_refused, refused);
    }
    EXPECT_EQ(sender().failure(), "");
  }
}

TEST_F(MulticastFaults, ASendingThreadThatFailsSaysSo) {
  for (const bool merge : {true, false}) {
    ranks(merge);
    (merge ? sendmsg_fault : sendmmsg_fault).set(kAlways, EBADF);
    sender().send(1, from_.data(), from_.size());
    sender().send(2, from_.data(), from_.size());
    sender_->await(0, Multicast::Event::Kind::kFailed);
    EXPECT_NE(sender().failure().find("sends"), std::string::npos) << sender().failure();
    sender().cancel(1);  // which waits for nobody
    sender().send(3, from_.data(), from_.size());
    sender().cancel(3);
  }
}

TEST_F(MulticastFaults, ReceivingGoesOnAfterAMoment) {
  for (const int error : {EINTR, ENOMEM, ENOBUFS}) {
    recvmmsg_fault.set(3, error);
    transfer_arrives();
  }
  EXPECT_EQ(receiver().failure(), "");
}

TEST_F(MulticastFaults, AReceivingThreadThatFailsSaysSo) {
  Destination to(from_.size());
  receiver().arm(1, 0, to.data(), from_.size(), kNever);
  recvmmsg_fault.set(kAlways, EBADF);
  sender().send(1, from_.data(), from_.size());
  receiver_->await(0, Multicast::Event::Kind::kFailed);
  EXPECT_NE(receiver().failure().find("receives"), std::string::npos) << receiver().failure();
  EXPECT_FALSE(receiver().missing(1, 1).empty());
  receiver().disarm(1);
}

}  // namespace
}  // namespace paceline
