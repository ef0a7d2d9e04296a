#include "engine/spreads.h"

#include <algorithm>

#include "common/log.h"

namespace paceline {
namespace {

// Transfers are numbered by operation and spread, so no number is used twice in a group.
constexpr uint32_t kSpreadBits = 24;

// More than this share missing is sent to all again; less is cheaper to get from a neighbour.
constexpr uint64_t kMuch = 20;

// A neighbour that was asked may itself wait for bytes; after so many times of quiet the source is asked.
constexpr uint32_t kPatience = 50;

uint64_t transfer_of(uint64_t seq, uint32_t number) { return seq << kSpreadBits | number; }

uint64_t sum(const std::vector<Range>& ranges) {
  uint64_t bytes = 0;
  for (const Range& range : ranges) bytes += range.bytes;
  return bytes;
}

// A gap has whole chunks, which are larger than this, so ranges cannot be many: but for the last one.
constexpr uint64_t kLeastRange = 256;

// Ascending, apart, within the transfer, and none of them smaller than a gap can be.
bool valid(const std::vector<Range>& ranges, uint64_t bytes) {
  uint64_t end = 0;
  for (const Range& range : ranges) {
    const bool small = range.bytes < kLeastRange && (range.bytes == 0 || range.offset + range.bytes != bytes);
    if (small || range.offset < end || range.offset > bytes || range.bytes > bytes - range.offset) {
      return false;
    }
    end = range.offset + range.bytes;
  }
  return true;
}

void merge(std::vector<Range>& all, const std::vector<Range>& more) {
  all.insert(all.end(), more.begin(), more.end());
  std::sort(all.begin(), all.end(), [](const Range& a, const Range& b) { return a.offset < b.offset; });
  std::vector<Range> merged;
  for (const Range& range : all) {
    if (!merged.empty() && range.offset <= merged.back().offset + merged.back().bytes) {
      const uint64_t end = std::max(merged.back().offset + merged.back().bytes, range.offset + range.bytes);
      merged.back().bytes = end - merged.back().offset;
    } else {
      merged.push_back(range);
    }
  }
  all = std::move(merged);
}

// The place of a rank among a spread's receivers, or -1.
int64_t place_of(const Spread& spread, uint32_t rank) {
  const auto found = std::lower_bound(spread.receivers.begin(), spread.receivers.end(), rank);
  return found != spread.receivers.end() && *found == rank ? found - spread.receivers.begin() : -1;
}

// The receiver before this one, beginning behind the source; the source itself for the first.
uint32_t neighbour(const Spread& spread, uint32_t rank) {
  const auto first = std::upper_bound(spread.receivers.begin(), spread.receivers.end(), spread.source);
  const auto self = std::lower_bound(spread.receivers.begin(), spread.receivers.end(), rank);
  if (self == (first == spread.receivers.end() ? spread.receivers.begin() : first)) return spread.source;
  return self == spread.receivers.begin() ? spread.receivers.back() : *(self - 1);
}

}  // namespace

void Spreads::begin(uint64_t seq, const Program& program, const std::vector<Place>& places) {
  if (program.spreads().empty()) return;
  Job& job = jobs_[seq];
  job.program = &program;
  job.spreads.resize(program.spreads().size());
  for (size_t i = 0; i < job.spreads.size(); ++i) {
    Running& running = job.spreads[i];
    const Spread& spread = program.spreads()[i];
    const Place& place = places[spread.chunk];
    running.spread = &spread;
    running.transfer = transfer_of(seq, spread.number);
    running.bytes = place.bytes;
    if (place.bytes < kLeastBytes) continue;
    running.sent = false;
    ++job.unsent;
    if (sends(running)) {
      running.state = State::kGathering;
      running.from = program.accesses()[spread.accesses.front()].from_input ? place.input : place.work;
      running.receivers.resize(spread.receivers.size());
    } else {
      running.state = State::kClosed;
      running.to = place.work;
    }
  }
}

void Spreads::end(uint64_t seq) noexcept {
  const auto found = jobs_.find(seq);
  if (found == jobs_.end()) return;
  for (const Running& running : found->second.spreads) {
    const bool armed = running.state == State::kArmed || running.state == State::kRepairing;
    const bool casts = running.state == State::kSending || running.state == State::kListening;
    if (armed) mover_.disarm(running.transfer);
    if (casts) mover_.cancel(running.transfer);
  }
  for (auto entry = repairs_.begin(); entry != repairs_.end();) {
    std::erase_if(entry->second, [seq](const Wish& wish) { return wish.seq == seq; });
    entry = entry->second.empty() ? repairs_.erase(entry) : std::next(entry);
  }
  owed_.erase(seq);
  jobs_.erase(found);
}

void Spreads::ready(uint64_t seq, uint32_t access) {
  const auto found = jobs_.find(seq);
  if (found == jobs_.end()) return;
  Running& running = found->second.spreads[static_cast<size_t>(found->second.program->accesses()[access].spread)];
  if (running.state == State::kGathering && !running.complete) {
    running.complete = true;
    return go_on();
  }
  if (running.state != State::kClosed) return;
  running.state = State::kArmed;
  mover_.arm(running.transfer, running.spread->source, running.to, running.bytes);
  tell(running.spread->source, running, FrameType::kArmed);
}

Spreads::Running* Spreads::find(uint64_t transfer, Job** job) {
  const auto found = jobs_.find(transfer >> kSpreadBits);
  if (found == jobs_.end()) return nullptr;
  *job = &found->second;
  const auto entry =
      std::lower_bound(found->second.spreads.begin(), found->second.spreads.end(), transfer,
                       [](const Running& running, uint64_t wanted) { return running.transfer < wanted; });
  return entry != found->second.spreads.end() && entry->transfer == transfer ? &*entry : nullptr;
}

// Sends what may be sent now.
void Spreads::go_on() {
  for (auto& [seq, job] : jobs_) {
    for (Running& running : job.spreads) {
      if (running.state != State::kGathering || !running.complete) continue;
      const int32_t after = running.spread->after;
      if (after >= 0 && !job.spreads[static_cast<size_t>(after)].sent) continue;
      const bool all_armed = std::all_of(running.receivers.begin(), running.receivers.end(),
                                         [](const Receiver& receiver) { return receiver.armed; });
      if (!all_armed) continue;
      running.state = State::kSending;
      running.round = 1;
      mover_.send(running.transfer, running.from, running.bytes, running.spread->width);
    }
    if (job.unsent > 0) return;
  }
}

void Spreads::mark_sent(Job& job, Running& running) {
  if (std::exchange(running.sent, true)) return;
  --job.unsent;
  go_on();
}

void Spreads::tell(uint32_t peer, const Running& running, FrameType type, std::vector<Range> ranges) {
  Effect effect;
  effect.kind = Effect::Kind::kTell;
  effect.peer = peer;
  effect.seq = running.transfer >> kSpreadBits;
  effect.note = {type, effect.seq, running.spread->number, running.round, running.bytes, std::move(ranges)};
  effects_.push_back(std::move(effect));
}

void Spreads::lied(uint32_t peer, const std::string& text) {
  Effect effect;
  effect.kind = Effect::Kind::kLied;
  effect.peer = peer;
  effect.text = text;
  effects_.push_back(std::move(effect));
}

void Spreads::on_event(const Multicast::Event& event) {
  Job* job = nullptr;
  Running* running = find(event.transfer, &job);
  if (running == nullptr) return;
  const bool armed = running->state == State::kArmed || running->state == State::kRepairing;
  switch (event.kind) {
    case Multicast::Event::Kind::kComplete:
      if (armed) finish(*job, *running);
      return;
    case Multicast::Event::Kind::kQuiet:
      if (armed) on_quiet(*running);
      return;
    case Multicast::Event::Kind::kSent:
      if (running->state != State::kSending) return;
      running->state = State::kListening;
      for (size_t i = 0; i < running->receivers.size(); ++i) {
        if (!running->receivers[i].has) tell(running->spread->receivers[i], *running, FrameType::kCast);
      }
      return mark_sent(*job, *running);
    case Multicast::Event::Kind::kFailed:
      return;  // of no transfer: its owner ends the group
  }
}

// All bytes are here.
void Spreads::finish(Job& job, Running& running) {
  mover_.disarm(running.transfer);
  running.state = State::kOver;
  for (const auto& [peer, ranges] : std::exchange(running.asked_by, {})) grant(peer, running, ranges);
  tell(running.spread->source, running, FrameType::kHave);
  Effect effect;
  effect.kind = Effect::Kind::kDone;
  effect.seq = running.transfer >> kSpreadBits;
  effect.access = running.spread->accesses.front();
  effects_.push_back(std::move(effect));
  mark_sent(job, running);
}

void Spreads::on_quiet(Running& running) {
  if (running.state == State::kArmed && running.round > running.answered) return answer(running);
  if (running.state != State::kRepairing || running.asks_source || ++running.silent < kPatience) return;
  running.asks_source = true;
  ask(running);
}

// What is missing of what the source has sent. Where nothing at all came, or sending it again did not help much, more
// of the same will not help either.
void Spreads::answer(Running& running) {
  std::vector<Range> gaps = mover_.missing(running.transfer, kMostRanges);
  if (gaps.empty()) return;  // it is complete, and will be told so
  const uint64_t lacks = sum(gaps);
  if (running.answered == 0 && lacks == running.bytes && !std::exchange(warned_, true)) {
    log(LogLevel::kWarning, "no multicast packet of rank " + std::to_string(running.spread->source) + " reaches rank " +
                                std::to_string(rank_) +
                                " any more: its bytes come over TCP, which is slower. Look for "
                                "a switch that has stopped to forward multicast (IGMP querier), or for a firewall");
  }
  const bool much = lacks > running.bytes / kMuch;
  const bool helps = running.answered == 0 ? lacks < running.bytes : lacks < running.lacked / 4 * 3;
  running.answered = running.round;
  running.lacked = lacks;
  if (much && helps && running.round < kMostRounds) {
    return tell(running.spread->source, running, FrameType::kLacks, std::move(gaps));
  }
  tell(running.spread->source, running, FrameType::kLacks);
  running.state = State::kRepairing;
  running.asks_source = neighbour(*running.spread, rank_) == running.spread->source;
  ask(running);
}

void Spreads::ask(Running& running) {
  std::vector<Range> gaps = mover_.missing(running.transfer, kMostRanges);
  if (gaps.empty()) return;
  running.asked = running.asks_source ? running.spread->source : neighbour(*running.spread, rank_);
  running.asked_left = sum(gaps);
  running.silent = 0;
  tell(running.asked, running, FrameType::kWant, std::move(gaps));
}

void Spreads::on_repair(uint32_t peer, const Repair& repair) {
  Job* job = nullptr;
  Running* running = find(transfer_of(repair.seq, repair.number), &job);
  if (repair.number >> kSpreadBits != 0) return lied(peer, "sent bytes that nobody asked for");
  if (running == nullptr || running->state == State::kOver) return;  // others were faster
  if (running->state != State::kRepairing || repair.length == 0 || repair.total != running->bytes ||
      repair.offset > running->bytes || repair.length > running->bytes - repair.offset) {
    return lied(peer, "sent bytes that nobody asked for");
  }
  running->silent = 0;
  counters_.repaired_bytes += repair.length;
  if (mover_.place(running->transfer, repair.offset, repair.from, repair.length)) return finish(*job, *running);
  if (peer != running->asked || running->asked_left == 0) return;
  running->asked_left -= std::min(running->asked_left, repair.length);
  if (running->asked_left == 0) ask(*running);
}

void Spreads::on_note(uint32_t peer, const SpreadNote& note) {
  Job* job = nullptr;
  Running* running = find(transfer_of(note.seq, note.number), &job);
  if (note.number >> kSpreadBits != 0 || running == nullptr || note.total != running->bytes ||
      running->bytes < kLeastBytes || !valid(note.ranges, running->bytes)) {
    return lied(peer, "sent a frame that is not part of the schedule");
  }
  const bool from_source = peer == running->spread->source;
  const bool from_receiver = place_of(*running->spread, peer) >= 0;
  switch (note.type) {
    case FrameType::kCast:
      if (from_source) return on_cast(peer, *job, *running, note);
      break;
    case FrameType::kOver:
      if (!from_receiver || sends(*running)) break;
      if (running->state != State::kRepairing || running->asked != peer || running->asks_source) return;
      running->asks_source = true;
      return ask(*running);
    case FrameType::kWant:
      if (from_receiver) return on_want(peer, *running, note);
      break;
    default:
      if (from_receiver && sends(*running)) return on_note_to_source(peer, *job, *running, note);
      break;
  }
  lied(peer, "sent a frame that is not part of the schedule");
}

void Spreads::on_cast(uint32_t peer, Job& job, Running& running, const SpreadNote& note) {
  if (running.state == State::kOver) return;  // the last packet was faster
  if (running.state == State::kClosed || note.round != running.round + 1) {
    return lied(peer, "says that it has sent what nobody was ready for");
  }
  running.round = note.round;
  mark_sent(job, running);
}

void Spreads::on_note_to_source(uint32_t peer, Job& job, Running& running, const SpreadNote& note) {
  const auto place = static_cast<size_t>(place_of(*running.spread, peer));
  Receiver& receiver = running.receivers[place];
  const bool sent = running.state == State::kSending || running.state == State::kListening;
  if (note.type == FrameType::kArmed && !receiver.armed) {
    receiver.armed = true;
    return go_on();
  }
  if (note.type == FrameType::kHave && sent && !receiver.has) return on_have(job, running, place);
  const bool answers = running.state == State::kListening && note.round == running.round && !receiver.has &&
                       !receiver.alone && receiver.answered < running.round;
  if (note.type != FrameType::kLacks || !answers || (running.round >= kMostRounds && !note.ranges.empty())) {
    return lied(peer, "sent a frame out of order");
  }
  receiver.answered = running.round;
  receiver.alone = note.ranges.empty();
  merge(running.lacking, note.ranges);
  next_round(running);
}

void Spreads::on_have(Job& job, Running& running, size_t receiver) {
  running.receivers[receiver].has = true;
  drop_repairs(running.spread->receivers[receiver], running);
  Effect effect;
  effect.kind = Effect::Kind::kDone;
  effect.seq = running.transfer >> kSpreadBits;
  effect.access = running.spread->accesses[receiver];
  effects_.push_back(std::move(effect));
  const bool all =
      std::all_of(running.receivers.begin(), running.receivers.end(), [](const Receiver& each) { return each.has; });
  if (!all) return next_round(running);
  mover_.cancel(running.transfer);
  running.state = State::kOver;
  mark_sent(job, running);
}

// Once everybody has said what it lacks, that goes to all again.
void Spreads::next_round(Running& running) {
  if (running.state != State::kListening || running.lacking.empty()) return;
  for (const Receiver& receiver : running.receivers) {
    if (!receiver.has && !receiver.alone && receiver.answered < running.round) return;
  }
  const std::vector<Range> lacking = std::exchange(running.lacking, {});
  const bool some = std::any_of(running.receivers.begin(), running.receivers.end(),
                                [](const Receiver& receiver) { return !receiver.has && !receiver.alone; });
  if (!some) return;
  running.state = State::kSending;
  ++running.round;
  ++counters_.rounds;
  mover_.send_again(running.transfer, running.from, running.bytes, lacking);
}

void Spreads::on_want(uint32_t peer, Running& running, const SpreadNote& note) {
  const bool has = sends(running) ? running.state == State::kSending || running.state == State::kListening
                                  : running.state == State::kOver;
  const bool keeps = running.state == State::kArmed || running.state == State::kRepairing;
  uint64_t& wanted = running.wanted[peer];
  const uint64_t bytes = sum(note.ranges);
  if (bytes == 0 || bytes > running.bytes - wanted || (!has && !keeps)) {
    if (sends(running) && running.state == State::kOver) return;  // all have it
    return lied(peer, "asks for bytes that it cannot need");
  }
  wanted += bytes;
  if (has) return grant(peer, running, note.ranges);
  std::vector<Range>& kept = running.asked_by[peer];
  kept.insert(kept.end(), note.ranges.begin(), note.ranges.end());
}

void Spreads::grant(uint32_t peer, const Running& running, const std::vector<Range>& ranges) {
  const uint64_t seq = running.transfer >> kSpreadBits;
  repairs_[peer].push_back({seq, &running, {ranges.begin(), ranges.end()}});
  owed_[seq][peer] += sum(ranges);
  Effect effect;
  effect.kind = Effect::Kind::kRepairs;
  effect.peer = peer;
  effects_.push_back(std::move(effect));
}

std::optional<Spreads::Repair> Spreads::next_repair(uint32_t peer, uint64_t most) {
  const auto found = repairs_.find(peer);
  if (found == repairs_.end()) return std::nullopt;
  Wish& wish = found->second.front();
  Range& range = wish.ranges.front();
  const Running& running = *wish.running;
  Repair repair;
  repair.seq = wish.seq;
  repair.number = running.spread->number;
  repair.offset = range.offset;
  repair.length = std::min(range.bytes, most);
  repair.total = running.bytes;
  repair.from = (sends(running) ? running.from : running.to) + range.offset;
  range.offset += repair.length;
  range.bytes -= repair.length;
  if (range.bytes == 0) wish.ranges.pop_front();
  if (wish.ranges.empty()) found->second.pop_front();
  if (found->second.empty()) repairs_.erase(found);
  return repair;
}

void Spreads::on_repaired(uint32_t peer, uint64_t seq, uint64_t bytes) {
  const auto found = owed_.find(seq);
  if (found == owed_.end()) return;
  const auto entry = found->second.find(peer);
  if (entry == found->second.end()) return;
  entry->second -= std::min(entry->second, bytes);
  if (entry->second > 0) return;
  found->second.erase(entry);
  if (!found->second.empty()) return;
  owed_.erase(found);
  Effect effect;
  effect.kind = Effect::Kind::kReleased;
  effect.seq = seq;
  effects_.push_back(std::move(effect));
}

// A peer has what it wanted by another way.
void Spreads::drop_repairs(uint32_t peer, const Running& running) {
  const auto found = repairs_.find(peer);
  if (found == repairs_.end()) return;
  uint64_t dropped = 0;
  std::erase_if(found->second, [&](const Wish& wish) {
    if (wish.running != &running) return false;
    for (const Range& range : wish.ranges) dropped += range.bytes;
    return true;
  });
  if (found->second.empty()) repairs_.erase(found);
  if (dropped > 0) on_repaired(peer, running.transfer >> kSpreadBits, dropped);
}

void Spreads::lose(uint32_t peer) {
  repairs_.erase(peer);
  std::vector<uint64_t> owing;
  for (const auto& [seq, peers] : owed_) {
    if (peers.count(peer) > 0) owing.push_back(seq);
  }
  for (const uint64_t seq : owing) on_repaired(peer, seq, UINT64_MAX);
  for (auto& [seq, job] : jobs_) {
    for (Running& running : job.spreads) {
      running.asked_by.erase(peer);
      if (running.state != State::kRepairing || running.asked != peer || running.asks_source) continue;
      running.asks_source = true;
      ask(running);
    }
  }
}

}  // namespace paceline
