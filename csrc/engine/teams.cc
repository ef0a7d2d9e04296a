#include "engine/teams.h"

#include <algorithm>
#include <utility>

#include "common/attempt.h"
#include "engine/engine.h"
#include "engine/group.h"

namespace paceline {
namespace {

// So many operations that peers have called and this rank has not are remembered, and so many that have ended.
constexpr size_t kMostWords = 4096;
constexpr size_t kMostEnded = 4096;
constexpr size_t kMostUntold = 4096;

// Who knows of no late member when the time is over lets others speak first, who may.
constexpr auto kOthersFirst = std::chrono::milliseconds(500);

}  // namespace

Team::Team(Group& group, std::shared_ptr<Operation> operation)
    : group_(group), operation_(std::move(operation)), collectives_(group, *this, Lane::kTeams, operation_->number) {}

void Team::fail(int64_t culprit, std::string reason, uint64_t) noexcept {
  if (!failure_.empty()) return;
  failure_ = std::move(reason);
  for (const Program::Peer& peer : operation_->program->peers()) {
    const bool told = attempt([&] {
      Connection* connection = group_.open_connection(peer.rank, Lane::kTeams);
      if (connection != nullptr) connection->abandon(operation_.get(), number());
      group_.teams().tell(peer.rank, {number(), culprit, failure_});
    });
    if (!told) group_.cut(peer.rank, Lane::kTeams);
  }
  collectives_.fail();
}

std::optional<std::string> Team::overdue(Clock::time_point now, int64_t* culprit) {
  std::vector<uint32_t> blamed;
  for (const Program::Peer& peer : operation_->program->peers()) {
    if (!collectives_.was_called_by(peer.rank, number())) blamed.push_back(peer.rank);
  }
  const bool absent = !blamed.empty();
  if (!absent) {
    if (!std::exchange(waits_for_others_, true)) {
      operation_->deadline = now + kOthersFirst;
      return std::nullopt;
    }
    blamed = collectives_.waits_for(*operation_);
  }
  std::string who;
  for (const uint32_t peer : blamed) who += (who.empty() ? "" : ", ") + group_.who(peer);
  *culprit = blamed.empty() ? -1 : static_cast<int64_t>(blamed.front());
  return "Timed out after " + in_seconds(operation_->timeout) + ": " + who +
         (absent ? " did not call it" : " called it, but was slow or could not be reached");
}

std::shared_ptr<Team> Teams::find(uint64_t number) const {
  const auto found = teams_.find(number);
  return found == teams_.end() ? nullptr : found->second;
}

template <typename Work>
void Teams::with(const std::shared_ptr<Team>& team, const Work& work) {
  work(*team);
  if (!team->collectives().idle() || find(team->number()) != team) return;
  teams_.erase(team->number());
  ended_.push_back(team->number());
  if (ended_.size() > kMostEnded) ended_.pop_front();
}

template <typename Work>
void Teams::with_all(const Work& work) {
  for (auto next = teams_.begin(); next != teams_.end();) {
    const std::shared_ptr<Team> team = next->second;
    with(team, work);
    next = teams_.upper_bound(team->number());
  }
}

bool Teams::has_ended(uint64_t number) const { return std::find(ended_.begin(), ended_.end(), number) != ended_.end(); }

// Where there is no room for more, what came first is forgotten: it is most likely about what nobody will call.
Teams::Word* Teams::remember(uint64_t number) {
  if (number < kFirstOfTeams || has_ended(number)) return nullptr;
  if (words_.size() >= kMostWords && words_.count(number) == 0) words_.erase(words_.begin());
  return &words_[number];
}

void Teams::post(const std::shared_ptr<Operation>& operation) {
  operation->seq = operation->number;
  if (!group_.failure().empty()) return;  // end_unposted does the rest
  if (find(operation->number) != nullptr || has_ended(operation->number)) {
    return operation->end(operation->title() + ": rank " + std::to_string(group_.rank()) +
                          " has used this number before: each operation of a team needs a new one");
  }
  const auto team = std::make_shared<Team>(group_, operation);
  Word word;
  if (const auto found = words_.find(operation->number); found != words_.end()) {
    word = std::move(found->second);
    words_.erase(found);
  }
  teams_[operation->number] = team;
  with(team, [&](Team& posted) {
    for (const uint32_t caller : word.callers) posted.collectives().called_by(caller, operation->number);
    posted.collectives().post(operation);
    if (word.given_up) posted.fail(word.given_up->culprit, word.given_up->reason);
    posted.collectives().end_unposted(operation);
  });
  group_.flush_marked();
}

void Teams::give_up(uint64_t number, const std::string& reason) {
  if (const std::shared_ptr<Team> team = find(number)) {
    with(team, [&](Team& running) { running.fail(group_.rank(), reason); });
    return group_.flush_marked();
  }
  Word* word = remember(number);
  if (word != nullptr && !word->given_up) word->given_up = GivenUp{number, group_.rank(), reason};
}

void Teams::tell(uint32_t peer, const GivenUp& given_up) {
  Connection* connection = group_.open_connection(peer, Lane::kTeams);
  // It may be just that connection that cannot be had.
  if (connection == nullptr) connection = group_.open_connection(peer, Lane::kMessages);
  if (connection == nullptr) connection = group_.open_connection(peer, Lane::kCollective);
  if (connection == nullptr) {
    untold_.emplace_back(peer, given_up);
    if (untold_.size() > kMostUntold) untold_.pop_front();
    return;
  }
  OutFrame frame;
  frame.header.type = FrameType::kGivenUp;
  frame.header.seq = given_up.number;
  frame.header.id = given_up.culprit < 0 ? UINT32_MAX : static_cast<uint32_t>(given_up.culprit);
  const std::string text = given_up.reason.substr(0, kMaxErrorBytes);
  frame.header.length = text.size();
  frame.owned.assign(text.begin(), text.end());
  connection->enqueue(std::move(frame));
  group_.mark(*connection);
}

void Teams::on_header(Connection& connection, const FrameHeader& header, uint8_t** to) {
  if (header.type == FrameType::kGivenUp) {
    std::vector<uint8_t>& text = texts_[&connection];
    text.resize(header.length);
    *to = text.data();
    return;
  }
  if (const std::shared_ptr<Team> team = find(header.seq)) {
    with(team, [&](Team& running) { running.collectives().on_header(connection, header, to); });
    if (*to != nullptr || find(header.seq) != nullptr) return;
  } else if (header.type == FrameType::kPosted) {
    if (Word* word = remember(header.seq)) word->callers.insert(connection.peer());
    return;
  }
  // Of an operation that was given up.
  trash_.resize(kMaxPayloadBytes);
  *to = trash_.data();
}

void Teams::on_frame(Connection& connection, const FrameHeader& header, const uint8_t* bytes) {
  const std::shared_ptr<Team> team = find(header.seq);
  if (header.type == FrameType::kGivenUp) {
    const std::vector<uint8_t> said = std::move(texts_[&connection]);
    texts_.erase(&connection);
    std::string reason(said.begin(), said.end());
    if (reason.find("(told by rank") == std::string::npos) {
      reason += " (told by rank " + std::to_string(connection.peer()) + ")";
    }
    const int64_t culprit = header.id < group_.size() ? static_cast<int64_t>(header.id) : -1;
    if (team != nullptr) {
      with(team, [&](Team& running) { running.fail(culprit, std::move(reason)); });
    } else if (Word* word = remember(header.seq); word != nullptr && !word->given_up) {
      word->given_up = GivenUp{header.seq, culprit, std::move(reason)};
    }
  } else if (team != nullptr) {
    with(team, [&](Team& running) { running.collectives().on_frame(connection, header, bytes); });
  }
}

void Teams::on_sent(Connection& connection, const OutFrame& frame) {
  const std::shared_ptr<Team> team = find(frame.header.seq);
  if (team != nullptr) with(team, [&](Team& running) { running.collectives().on_sent(connection, frame); });
}

void Teams::on_room(Connection& connection) {
  with_all([&](Team& team) {
    if (connection.has_room()) team.collectives().on_room(connection);
  });
}

void Teams::attached(Connection& connection) {
  if (connection.lane() == Lane::kTeams) {
    with_all([&](Team& team) { team.collectives().attached(connection); });
  }
  for (auto& [peer, given_up] : std::exchange(untold_, {})) {
    if (peer == connection.peer()) {
      tell(peer, given_up);
    } else {
      untold_.emplace_back(peer, std::move(given_up));
    }
  }
}

void Teams::forget(const Connection& connection) {
  texts_.erase(&connection);
  for (const auto& [number, team] : teams_) team->collectives().forget(connection);
}

void Teams::lose(uint32_t peer) {
  with_all([&](Team& team) {
    if (team.collectives().needs(peer)) team.fail(peer, group_.who(peer) + " " + group_.ending(peer));
  });
  group_.flush_marked();
}

void Teams::fail() noexcept {
  const auto teams = std::move(teams_);
  teams_.clear();
  words_.clear();
  untold_.clear();
  for (const auto& [number, team] : teams) {
    if (!attempt([&team = team, this] { team->fail(-1, group_.failure()); })) team->collectives().fail();
  }
}

bool Teams::needs(uint32_t peer) const {
  return std::any_of(teams_.begin(), teams_.end(),
                     [peer](const auto& entry) { return entry.second->collectives().needs(peer); });
}

bool Teams::has_work() const {
  return std::any_of(teams_.begin(), teams_.end(),
                     [](const auto& entry) { return entry.second->collectives().has_work(); });
}

bool Teams::work() {
  bool worked = false;
  with_all([&](Team& team) { worked = team.collectives().work() || worked; });
  return worked;
}

Clock::time_point Teams::tick(Clock::time_point now) {
  Clock::time_point next = Clock::time_point::max();
  with_all([&](Team& team) {
    const std::shared_ptr<Operation> operation = team.collectives().earliest(&Operation::deadline);
    if (operation != nullptr && operation->deadline <= now) {
      int64_t culprit = -1;
      if (const auto reason = team.overdue(now, &culprit)) return team.fail(culprit, *reason);
    }
    if (operation != nullptr) next = std::min(next, operation->deadline);
    next = std::min(next, team.collectives().tick(now));
  });
  group_.flush_marked();
  return next;
}

}  // namespace paceline
