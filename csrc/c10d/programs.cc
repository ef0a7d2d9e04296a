#include "c10d/programs.h"

#include <algorithm>
#include <set>

namespace paceline {
namespace {

// There are more teams than one can keep programs for.
constexpr size_t kMostPrograms = 2048;

}  // namespace

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
  if (!request.members.empty()) made = made->among(request.members);
  const std::lock_guard lock(mutex_);
  if (programs_.size() >= kMostPrograms) {
    std::erase_if(programs_, [](const auto& entry) { return !entry.first.members.empty(); });
  }
  return programs_[request] = std::move(made);
}

std::vector<std::string> Programs::chosen() {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> lines;
  std::set<std::string> of_teams;  // which are many and alike
  for (const auto& [request, program] : programs_) {
    std::string line = std::string(name(request.kind)) + " up to " + std::to_string(request.bytes) + " bytes";
    if (!request.choice.empty()) line += ", late " + request.choice;
    line += ": " + program->name();
    if (request.members.empty()) {
      lines.push_back(line);
    } else {
      of_teams.insert("partial " + line + " of " + std::to_string(request.members.size()) + " ranks");
    }
  }
  lines.insert(lines.end(), of_teams.begin(), of_teams.end());
  return lines;
}

}  // namespace paceline
