#include "engine/decisions.h"

#include <algorithm>
#include <utility>

#include "engine/engine.h"
#include "engine/group.h"

namespace paceline {
namespace {

constexpr uint32_t kCoordinator = 0;

constexpr size_t kRecords = 1024;

// No program has so many collectives in flight: whoever says so makes no sense.
constexpr uint64_t kMostTurnsAhead = 1 << 12;

std::string join(const std::vector<uint32_t>& ranks) {
  std::string text;
  for (const uint32_t rank : ranks) text += (text.empty() ? "" : ",") + std::to_string(rank);
  return text;
}

}  // namespace

uint64_t Decisions::Record::bytes() const { return call.count * element_bytes(call.dtype); }

bool Decisions::coordinates() const { return group_.rank() == kCoordinator; }

void Decisions::decide_by(Rules rules) {
  rules_ = std::move(rules);
  if (!rules_->enabled && !pending_.empty()) return refuse(pending_.front().first);
  // Early, so that nobody is still being introduced when the first collective fails: it would not hear why.
  if (rules_->enabled && !coordinates()) group_.connection(kCoordinator, Lane::kMessages);
  settle(Clock::now());
  group_.flush_marked();
}

void Decisions::refuse(uint32_t peer) {
  group_.fail(peer, group_.who(peer) +
                        " awaits a decision that rank 0 does not make: set PACELINE_LATE, PACELINE_DETERMINISTIC and "
                        "PACELINE_ALGORITHM alike on all ranks");
}

void Decisions::called(const Operation& operation) {
  for (const Record& record : pending_) {
    if (record.seq != operation.seq || record.first == group_.rank()) continue;
    if (operation.awaits() || !record.call.fits(operation.call)) {
      return group_.collectives().compare(record.first, record.seq, record.call);
    }
    return refuse(record.first);
  }
}

std::optional<std::string> Decisions::await(const std::shared_ptr<Operation>& operation) {
  operation->turn = ++turns_;
  awaiting_[operation->turn] = operation;
  if (coordinates()) {
    arrive(group_.rank(), operation->turn, operation->seq, operation->call);
  } else {
    FrameHeader header;
    header.type = FrameType::kArrived;
    header.seq = operation->seq;
    header.offset = operation->turn;
    header.call = operation->call;
    unsaid_.push_back(header);
    attached(kCoordinator);
  }
  group_.flush_marked();
  if (!group_.failure().empty()) return std::nullopt;
  const auto waiting = awaiting_.find(operation->turn);
  const std::string* choice = choice_of(operation->turn);
  if (waiting == awaiting_.end() || choice == nullptr) return std::nullopt;
  awaiting_.erase(waiting);
  std::optional<Prepared> known = operation->prepare(*choice, false);
  std::optional<std::string> to_prepare;
  if (!known) to_prepare = *choice;
  prune();
  if (known) group_.collectives().begin(operation, std::move(*known));
  return to_prepare;
}

std::vector<uint32_t> Decisions::waits_for(const Operation& operation) const {
  if (operation.turn <= decided_) return {};
  if (!coordinates()) return {kCoordinator};
  std::vector<uint32_t> missing = missing_at(pending_[operation.turn - first_pending_]);
  std::erase(missing, group_.rank());
  return missing;
}

// The other side has just opened, or was open.
void Decisions::attached(uint32_t peer) {
  if (coordinates()) return tell(peer);
  if (peer != kCoordinator || unsaid_.empty()) return;
  Connection* connection = group_.connection(peer, Lane::kMessages);
  if (connection == nullptr) return;
  for (const FrameHeader& header : unsaid_) connection->enqueue_urgent(header);
  unsaid_.clear();
  group_.mark(*connection);
}

void Decisions::on_header(Connection& connection, const FrameHeader& header, uint8_t** to) {
  if (header.type != FrameType::kDecided) return;
  std::vector<uint8_t>& text = texts_[&connection];
  text.resize(std::max<size_t>(header.length, 1));
  *to = text.data();
}

void Decisions::on_frame(Connection& connection, const FrameHeader& header) {
  const uint32_t peer = connection.peer();
  if (header.type == FrameType::kArrived) {
    if (!coordinates()) return group_.fail(peer, group_.who(peer) + " takes this rank for the coordinator");
    return arrive(peer, header.offset, header.seq, header.call);
  }
  const std::vector<uint8_t> bytes = std::move(texts_[&connection]);
  texts_.erase(&connection);
  if (peer != kCoordinator) return group_.fail(peer, group_.who(peer) + " decides, and is not the coordinator");
  if (header.offset != decided_ + 1 || header.seq < header.offset || header.seq > turns_ + kMostTurnsAhead) {
    return group_.fail(peer, group_.who(peer) + " sent a decision out of order");
  }
  const auto length = static_cast<std::ptrdiff_t>(header.length);
  learn({header.offset, header.seq, std::string(bytes.begin(), bytes.begin() + length)});
}

void Decisions::arrive(uint32_t rank, uint64_t turn, uint64_t seq, const Call& call) {
  if (rules_ && !rules_->enabled) return refuse(rank);
  if (arrived_.empty()) {
    arrived_.resize(group_.size());
    told_.resize(group_.size());
    absent_.resize(group_.size());
  }
  if (turn != arrived_[rank] + 1 || turn >= first_pending_ + kMostTurnsAhead) {
    return group_.fail(rank, group_.who(rank) + " counts its collectives wrong");
  }
  const Clock::time_point now = Clock::now();
  arrived_[rank] = turn;
  absent_[rank] = false;
  if (turn == first_pending_ + pending_.size()) {
    Record& record = pending_.emplace_back();
    record.turn = turn;
    record.seq = seq;
    record.call = call;
    record.first = rank;
    record.arrivals.resize(group_.size());
    record.missing = group_.size();
    if (const std::string* choice = choice_of(turn)) record.choice = *choice;
  }
  Record& record = pending_[turn - first_pending_];
  if (record.seq != seq || !record.call.fits(call)) {
    return group_.fail(rank,
                       "rank " + std::to_string(record.first) + " called " + record.call.text() + " as #" +
                           std::to_string(record.seq) + ", and rank " + std::to_string(rank) + " called " +
                           call.text() + " as #" + std::to_string(seq) +
                           ": all ranks must call the same collectives in the same order",
                       std::min(seq, record.seq));
  }
  if (rank != group_.rank()) {
    group_.collectives().compare(rank, seq, call);
    if (!group_.failure().empty()) return;
  }
  record.arrivals[rank] = record.last = now;
  --record.missing;
  // A rank is known to have died by the end of its connection: have one to each.
  for (uint32_t peer = 0; peer < group_.size() && group_.failure().empty(); ++peer) {
    if (peer == group_.rank()) continue;
    group_.connection(peer, Lane::kMessages);
    if (group_.gone(peer, Lane::kMessages)) group_.lose(peer, "");
  }
  if (group_.failure().empty()) settle(now);
}

std::vector<uint32_t> Decisions::missing_at(const Record& record) const {
  std::vector<uint32_t> missing;
  for (uint32_t rank = 0; rank < group_.size(); ++rank) {
    if (arrived_[rank] < record.turn) missing.push_back(rank);
  }
  return missing;
}

std::chrono::duration<double> Decisions::patience(const Record& record) const {
  return std::max(rules_->least_patience,
                  std::chrono::duration<double>(static_cast<double>(record.bytes()) * rules_->patience_s_per_byte));
}

// Decides whatever can be decided by now. Nobody comes to a turn without having come to those before it, so turns are
// decided in order.
void Decisions::settle(Clock::time_point now) {
  settle_at_ = Clock::time_point::max();
  if (!coordinates() || !rules_ || !rules_->enabled) return;
  const uint64_t reached = first_pending_ + pending_.size() - 1;
  if (!forecast_.empty() && decided_ < reached + rules_->window / 2) {
    decide(decided_ + 1, std::max(decided_, reached) + rules_->window, forecast_);
  }
  while (group_.failure().empty() && decided_ < reached) {
    const Record& record = pending_[decided_ + 1 - first_pending_];
    const std::vector<uint32_t> missing = missing_at(record);
    if (missing.size() > rules_->most_missing) break;
    const bool known = std::all_of(missing.begin(), missing.end(), [this](uint32_t rank) { return absent_[rank]; });
    const auto until = record.last + std::chrono::duration_cast<Clock::duration>(patience(record));
    if (!known && now < until) {
      settle_at_ = until;
      group_.engine().due_by(until);
      break;
    }
    for (const uint32_t rank : missing) absent_[rank] = true;
    decide(record.turn, record.turn, join(missing));
  }
  while (!pending_.empty() && pending_.front().missing == 0 && pending_.front().turn <= decided_) {
    records_.push_back(pending_.front());
    fresh_.push_back(std::move(pending_.front()));
    pending_.pop_front();
    ++first_pending_;
  }
  while (records_.size() > kRecords) records_.pop_front();
  while (fresh_.size() > kRecords) fresh_.pop_front();
  if (!fresh_.empty() && !asking_ && rules_->forecast && group_.failure().empty()) {
    asking_ = true;
    rules_->elsewhere([group = group_.shared_from_this()] { group->engine().forecast(group); });
  }
}

std::function<std::string(const std::vector<Decisions::Record>&)> Decisions::next_question(std::vector<Record>* fresh) {
  asking_ = !fresh_.empty() && group_.failure().empty();
  if (!asking_) return nullptr;
  fresh->assign(fresh_.begin(), fresh_.end());
  fresh_.clear();
  return rules_->forecast;
}

void Decisions::foresee(const std::string& choice) {
  if (!group_.failure().empty()) return;
  forecast_ = choice.substr(0, kMaxChoiceBytes);
  settle(Clock::now());
  group_.flush_marked();
}

void Decisions::decide(uint64_t first, uint64_t last, const std::string& choice) {
  for (uint64_t turn = std::max(first, first_pending_); turn <= last && turn < first_pending_ + pending_.size();
       ++turn) {
    pending_[turn - first_pending_].choice = choice;
  }
  book_.push_back({first, last, choice});
  decided_ = last;
  for (uint32_t peer = 0; peer < group_.size(); ++peer) {
    if (peer != group_.rank()) tell(peer);
    if (!group_.failure().empty()) return;
  }
  follow();
}

void Decisions::learn(const Decision& decision) {
  book_.push_back(decision);
  decided_ = decision.last;
  follow();
}

// What is decided begins, each by the decision of its own turn.
void Decisions::follow() {
  while (!awaiting_.empty() && awaiting_.begin()->first <= decided_ && group_.failure().empty()) {
    const std::shared_ptr<Operation> operation = awaiting_.begin()->second;
    const std::string choice = *choice_of(operation->turn);
    awaiting_.erase(awaiting_.begin());
    launch(operation, choice);
  }
  prune();
}

const std::string* Decisions::choice_of(uint64_t turn) const {
  for (const Decision& decision : book_) {
    if (decision.first <= turn && turn <= decision.last) return &decision.choice;
  }
  return nullptr;
}

void Decisions::launch(const std::shared_ptr<Operation>& operation, const std::string& choice) {
  std::optional<Prepared> known = operation->prepare(choice, false);
  if (known) return group_.collectives().begin(operation, std::move(*known));
  rules_->elsewhere(
      [group = group_.shared_from_this(), operation, choice] { group->engine().prepare(group, operation, choice); });
}

void Decisions::tell(uint32_t peer) {
  if (told_.empty() || told_[peer] >= decided_) return;
  Connection* connection = group_.connection(peer, Lane::kMessages);
  if (connection == nullptr) return;
  for (const Decision& decision : book_) {
    if (decision.last <= told_[peer]) continue;
    OutFrame frame;
    frame.header.type = FrameType::kDecided;
    frame.header.offset = decision.first;
    frame.header.seq = decision.last;
    frame.owned.assign(decision.choice.begin(), decision.choice.end());
    frame.header.length = frame.owned.size();
    connection->enqueue_urgent(std::move(frame));
  }
  told_[peer] = decided_;
  group_.mark(*connection);
}

// What every rank has been told of and this one has come past is not needed any more.
void Decisions::prune() {
  uint64_t past = awaiting_.empty() ? turns_ : awaiting_.begin()->first - 1;
  for (uint32_t peer = 0; peer < told_.size(); ++peer) {
    if (peer != group_.rank()) past = std::min(past, told_[peer]);
  }
  while (!book_.empty() && book_.front().last <= past) book_.pop_front();
}

void Decisions::fail() noexcept {
  awaiting_.clear();
  unsaid_.clear();
  pending_.clear();
  fresh_.clear();
  book_.clear();
  settle_at_ = Clock::time_point::max();
}

Clock::time_point Decisions::tick(Clock::time_point now) {
  if (now >= settle_at_) {
    settle(now);
    group_.flush_marked();
  }
  return settle_at_;
}

}  // namespace paceline
