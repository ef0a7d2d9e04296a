#include "c10d/programs.h"

#include <algorithm>

namespace paceline {

std::shared_ptr<const Program> Programs::find(const PlanRequest& request) {
  const std::lock_guard lock(mutex_);
  const auto known = programs_.find(request);
  return known == programs_.end() ? nullptr : known->second;
}

std::shared_ptr<const Program> Programs::get(const PlanRequest& request) {
  if (auto known = find(request)) return known;
  const std::lock_guard planning(planning_);
  if (auto known = find(request)) return known;
  auto made = planner_(request);
  const std::lock_guard lock(mutex_);
  return programs_[request] = std::move(made);
}

std::vector<std::string> Programs::chosen() {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> lines;
  for (const auto& [request, program] : programs_) {
    std::string line = std::string(name(request.kind)) + " up to " + std::to_string(request.bytes) + " bytes";
    if (!request.choice.empty()) line += ", late " + request.choice;
    lines.push_back(line + ": " + program->name());
  }
  return lines;
}

}  // namespace paceline
