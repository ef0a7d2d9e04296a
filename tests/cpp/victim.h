// A group of two whose rank 0 is an engine and whose rank 1 is played by the test, and the frames it may send.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "impostor.h"
#include "ranks.h"

namespace paceline::testing {

class Victim {
 public:
  explicit Victim(bool shm = false);
  ~Victim();

  // Its group has multicast from now on.
  void spread_by_multicast();
  // Rank 1, introduced.
  Impostor impostor(Lane lane);

  // With a number, as a team.
  Pending post(const Job& job, std::chrono::milliseconds timeout = std::chrono::seconds(20), uint64_t number = 0);
  Pending message(bool receives, uint32_t tag, std::vector<uint8_t>& bytes,
                  std::chrono::milliseconds timeout = std::chrono::seconds(20));

  std::string failure() { return engine_.failure(group_); }
  // The failure, as soon as there is one.
  std::string fails();
  // The call of the operation posted last, as rank 1 would put it into its frames.
  const Call& call() const { return operation_->call; }

 private:
  Engine engine_;
  bool shm_;
  Membership member_;
  std::shared_ptr<Group> group_;
  std::shared_ptr<Operation> operation_;
};

FrameHeader data_frame(const Call& call, uint64_t total, uint64_t offset, uint64_t length);
FrameHeader message_frame(FrameType type, uint64_t number, uint32_t tag, uint64_t length);

// A broadcast of int32 from rank 1 to rank 0.
Job to_zero(uint64_t count);

}  // namespace paceline::testing
