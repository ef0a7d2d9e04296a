#include "transport/multicast/thread.h"

#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>

#include "common/log.h"

namespace paceline {

SignalsBlocked::SignalsBlocked() {
  sigset_t all;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before_);
}

SignalsBlocked::~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

void name_and_pin(const std::string& name, int core) {
  ::pthread_setname_np(::pthread_self(), name.c_str());
  // Sleeps of fractions of a millisecond, which the pacing is made of, are to end when they should.
  ::prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);
  if (core < 0) return;
  cpu_set_t only;
  CPU_ZERO(&only);
  if (core < CPU_SETSIZE) CPU_SET(core, &only);
  if (::pthread_setaffinity_np(::pthread_self(), sizeof(only), &only) != 0) {
    log(LogLevel::kWarning, "multicast: its thread cannot be pinned to core " + std::to_string(core));
  }
}

}  // namespace paceline
