// When a host counts as dead, by what its kernel has answered.
#include <gtest/gtest.h>

#include "transport/liveness.h"

namespace paceline::testing {
namespace {

using namespace std::chrono_literals;

class Wire final : public Transport {
 public:
  const std::string& address() const override { return nowhere_; }
  bool reaches(const std::string&) const override { return true; }
  int listening_fd() const override { return -1; }
  Fd accept() override { return {}; }
  Fd connect(const std::string&) override { return {}; }
  size_t limit_unsent(int) const override { return 0; }
  std::unique_ptr<Rings> create_rings() const override { return nullptr; }
  std::chrono::milliseconds owes_answer_for(int) const override { return silence; }

  std::chrono::milliseconds silence{0};

 private:
  std::string nowhere_;
};

// Looks every half a second for so long; returns whether the host was lost, and after how long.
class Clockwork {
 public:
  bool lost_within(std::chrono::milliseconds time, std::chrono::seconds timeout = 10s) {
    for (const auto end = now + time; now < end;) {
      now += 500ms;
      if (liveness.lost(wire, 0, timeout, now)) return true;
      if (wire.silence.count() > 0) wire.silence += 500ms;
    }
    return false;
  }

  Wire wire;
  Liveness liveness;
  Liveness::Clock::time_point now = Liveness::Clock::time_point(1h);
};

TEST(Liveness, AHostThatOwesAnAnswerForTooLongIsLost) {
  Clockwork clock;
  EXPECT_FALSE(clock.lost_within(1min));
  clock.wire.silence = 1ms;
  EXPECT_FALSE(clock.lost_within(9s));
  EXPECT_TRUE(clock.lost_within(3s));
}

TEST(Liveness, AnOldAnswerIsNoSilenceIfNothingWasAsked) {
  Clockwork clock;
  EXPECT_FALSE(clock.lost_within(1min));
  clock.wire.silence = 1min;  // the last answer: the question is new
  EXPECT_FALSE(clock.lost_within(9s));
}

TEST(Liveness, EveryAnswerCounts) {
  Clockwork clock;
  for (int i = 0; i < 20; ++i) {
    clock.wire.silence = 1ms;
    EXPECT_FALSE(clock.lost_within(8s));
  }
}

TEST(Liveness, AProcessThatStoodStillBlamesNobody) {
  Clockwork clock;
  clock.wire.silence = 1ms;
  EXPECT_FALSE(clock.lost_within(5s));
  clock.now += 1h;
  clock.wire.silence = 1h;
  EXPECT_FALSE(clock.lost_within(8s));
}

TEST(Liveness, WithoutATimeoutNobodyIsLost) {
  Clockwork clock;
  clock.wire.silence = 1ms;
  EXPECT_FALSE(clock.lost_within(1h, 0s));
}

}  // namespace
}  // namespace paceline::testing
