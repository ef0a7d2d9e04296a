// Threads that serve the process without being seen by it.
#pragma once

#include <csignal>
#include <string>
#include <thread>
#include <utility>

namespace paceline {

// Blocks all signals as long as it lives, so that a thread that is started meanwhile gets none: they are the training
// thread's.
class SignalsBlocked {
 public:
  SignalsBlocked();
  ~SignalsBlocked();
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_{};
};

// For the calling thread: its name, and the core on which it stays, unless that is negative.
void name_and_pin(const std::string& name, int core);

template <typename Work>
std::thread start_thread(const std::string& name, int core, Work work) {
  const SignalsBlocked blocked;
  return std::thread([name, core, work = std::move(work)] {
    name_and_pin(name, core);
    work();
  });
}

}  // namespace paceline
