#include <gtest/gtest.h>
#include <sched.h>

#include <thread>
#include <vector>

#include "common/cores.h"

namespace paceline {
namespace {

// Affinity is a thread's: what a test changes ends with it.
template <class Task>
void in_a_thread(Task task) {
  std::thread(task).join();
}

TEST(Cores, AThreadMovesAndStaysAsFreeAsBefore) {
  for (const int core : allowed_cores()) {
    in_a_thread([core] {
      const std::vector<int> before = allowed_cores();
      move_to(core);
      EXPECT_EQ(allowed_cores(), before);
    });
  }
}

TEST(Cores, AThreadMovesAtOnce) {
  const std::vector<int> cores = allowed_cores();
  if (cores.size() < 2) GTEST_SKIP() << "there is nowhere to move with one core";
  in_a_thread([&cores] {
    // It may be taken elsewhere right after: that it is ever found there says that it was moved.
    for (const int core : cores) {
      bool there = false;
      for (int attempt = 0; attempt < 100 && !there; ++attempt) {
        move_to(core);
        there = ::sched_getcpu() == core;
      }
      EXPECT_TRUE(there) << "core " << core;
    }
  });
}

TEST(Cores, AThreadThatIsPinnedStaysWhereItIs) {
  const std::vector<int> cores = allowed_cores();
  if (cores.size() < 2) GTEST_SKIP() << "there is nowhere to move with one core";
  in_a_thread([&cores] {
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(cores.front(), &only);
    ASSERT_EQ(::sched_setaffinity(0, sizeof(only), &only), 0);
    move_to(cores.back());
    EXPECT_EQ(allowed_cores(), std::vector<int>{cores.front()});
    EXPECT_EQ(::sched_getcpu(), cores.front());
  });
}

}  // namespace
}  // namespace paceline
