// The book of a group's programs: made by the planner when first asked for, then kept.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/decisions.h"
#include "engine/program.h"

namespace paceline {

// What the planner is asked: the collective, its root, the bytes of the whole buffer (rounded up to a power of two, so
// that few schedules serve all sizes), whether the order of additions is free (whole numbers, min, max, moves), what
// was decided about late ranks (empty: nothing), and which ranks take part, in order (empty: all).
struct PlanRequest {
  Kind kind;
  int root = 0;
  uint64_t bytes = 0;
  bool exact = false;
  std::string choice;
  std::vector<uint32_t> members;

  auto operator<=>(const PlanRequest&) const = default;
};
using Planner = std::function<std::shared_ptr<const Program>(const PlanRequest&)>;

// What a group is given when all have met.
struct Plans {
  Planner planner;
  Decisions::Rules rules;
  uint64_t least_awaiting_bytes = UINT64_MAX;
};

class Programs {
 public:
  explicit Programs(Planner planner) : planner_(std::move(planner)) {}

  // The program if it is in the book, otherwise nullptr. Does not wait.
  std::shared_ptr<const Program> find(const PlanRequest& request);
  // Asks the planner where it must, which may take a while and needs Python.
  std::shared_ptr<const Program> get(const PlanRequest& request);
  // Which algorithm runs each kind of request so far: "allreduce up to 67108864 bytes: ring".
  std::vector<std::string> chosen();

 private:
  Planner planner_;
  std::mutex planning_;  // one plan at a time
  std::mutex mutex_;     // of the book
  std::map<PlanRequest, std::shared_ptr<const Program>> programs_;
};

}  // namespace paceline
