// Collectives, what goes to many ranks at once: between the operations and the protocol (spreads.h).
#include <algorithm>
#include <utility>

#include "engine/collectives.h"
#include "engine/engine.h"
#include "engine/group.h"
#include "transport/bytes.h"

namespace paceline {
namespace {

// While it lives, a flag is set.
class Flag {
 public:
  explicit Flag(bool& flag) : flag_(flag) { flag_ = true; }
  ~Flag() { flag_ = false; }
  Flag(const Flag&) = delete;
  Flag& operator=(const Flag&) = delete;

 private:
  bool& flag_;
};

}  // namespace

void Collectives::spread_by(PacketMover& mover) { spreads_ = std::make_unique<Spreads>(group_.rank(), mover); }

bool Collectives::spreads_any(const Operation& operation) const {
  if (spreads_ == nullptr || operation.program->spreads().empty()) return false;
  const std::vector<Spread>& spreads = operation.program->spreads();
  return std::any_of(spreads.begin(), spreads.end(),
                     [&](const Spread& spread) { return by_packets(operation, spread.accesses.front()); });
}

void Collectives::begin_spreads(const std::shared_ptr<Operation>& operation) {
  spreads_->begin(operation->seq, *operation->program, operation->places);
  const std::vector<Access>& accesses = operation->program->accesses();
  for (uint32_t i = 0; i < accesses.size(); ++i) {
    if (!by_packets(*operation, i)) continue;
    const uint64_t bytes = operation->places[accesses[i].chunk].bytes;
    if (!accesses[i].write) operation->progress[i].moved = bytes;  // its receivers are waited for from now on
    if (limit(*operation, i) == bytes) spreads_->ready(operation->seq, i);
  }
  carry_out();
}

// What one effect leads to may have others: they come after it.
void Collectives::carry_out() {
  if (carries_out_) return;
  const Flag flag(carries_out_);
  for (auto effects = spreads_->take_effects(); !effects.empty(); effects = spreads_->take_effects()) {
    for (const Spreads::Effect& effect : effects) {
      if (!owner_.failure().empty()) return;
      const std::shared_ptr<Operation> operation = find(effect.seq);
      switch (effect.kind) {
        case Spreads::Effect::Kind::kTell:
          tell(effect.peer, effect.note);
          break;
        case Spreads::Effect::Kind::kDone:
          if (operation != nullptr) {
            const uint64_t bytes = operation->places[operation->program->accesses()[effect.access].chunk].bytes;
            operation->progress[effect.access].moved = bytes;
            advance(operation, effect.access, bytes);
          }
          break;
        case Spreads::Effect::Kind::kRepairs:
          if (Connection* connection = group_.connection(effect.peer, lane_)) group_.mark(*connection);
          break;
        case Spreads::Effect::Kind::kReleased:
          if (operation != nullptr && operation->left == 0 && !operation->in_epilogue) complete(operation);
          break;
        case Spreads::Effect::Kind::kLied:
          owner_.fail(effect.peer, group_.who(effect.peer) + " " + effect.text);
          break;
      }
    }
  }
}

void Collectives::tell(uint32_t peer, const SpreadNote& note, const Call* call) {
  const std::shared_ptr<Operation> operation = find(note.seq);
  if (call == nullptr && operation != nullptr) call = &operation->call;
  if (group_.gone(peer, lane_)) return;  // it has all it needs, or its loss ends the group
  OutFrame frame;
  frame.header.type = note.type;
  frame.header.id = note.number;
  frame.header.seq = note.seq;
  frame.header.offset = note.round;
  frame.header.total = note.total;
  frame.header.length = note.ranges.size() * kRangeBytes;
  if (call != nullptr) frame.header.call = *call;
  frame.owned.resize(frame.header.length);
  ByteWriter writer(frame.owned.data());
  for (const Range& range : note.ranges) {
    writer.put(range.offset);
    writer.put(range.bytes);
  }
  Connection* connection = group_.connection(peer, lane_);
  if (connection == nullptr) {
    untold_[peer].push_back(std::move(frame));
    return;
  }
  connection->enqueue_urgent(std::move(frame));
  group_.mark(*connection);
}

// This rank's part of the operation has ended, and others may not know that: what they say is of no use any more.
FrameHandler::Verdict Collectives::take_spread_frame_of_ended(Connection& connection, const FrameHeader& header,
                                                              uint8_t** to) {
  const Call* ours = called(header.seq);
  if (ours != nullptr && !header.call.fits(*ours)) {
    disagree(connection.peer(), header.call, header.seq);
    return FrameHandler::Verdict::kTake;
  }
  Receiving& receiving = receiving_[&connection];
  receiving = {};
  receiving.begun = true;
  receiving.buffer = group_.engine().scratch().take(header.length);
  *to = receiving.buffer.data();
  return FrameHandler::Verdict::kTake;
}

void Collectives::on_spread_frame(uint32_t peer, const FrameHeader& header, const uint8_t* bytes) {
  const std::shared_ptr<Operation> operation = find(header.seq);
  if (operation == nullptr || operation->in_epilogue) {
    // The asker's own call, for this rank may have forgotten its own.
    const Connection* connection = header.type == FrameType::kWant ? group_.connection(peer, lane_) : nullptr;
    if (connection == nullptr || !connection->may_answer()) return;  // it asks, and does not read
    return tell(peer, {FrameType::kOver, header.seq, header.id, 0, header.total, {}}, &header.call);
  }
  if (header.call != operation->call) return disagree(peer, header.call, header.seq);
  if (header.type == FrameType::kRepair) {
    spreads_->on_repair(peer, {header.seq, header.id, header.offset, header.length, header.total, bytes});
    return carry_out();
  }
  SpreadNote note{header.type, header.seq, header.id, header.offset, header.total, {}};
  ByteReader reader(bytes);
  for (uint64_t i = 0; i < header.length / kRangeBytes; ++i) {
    const auto offset = reader.get<uint64_t>();
    note.ranges.push_back({offset, reader.get<uint64_t>()});
  }
  spreads_->on_note(peer, note);
  carry_out();
}

void Collectives::hand_over_repairs(Connection& connection) {
  while (spreads_ != nullptr && connection.has_room()) {
    const auto repair = spreads_->next_repair(connection.peer(), connection.slice_bytes());
    if (!repair) return;
    const std::shared_ptr<Operation> operation = find(repair->seq);
    OutFrame frame;
    frame.header.type = FrameType::kRepair;
    frame.header.id = repair->number;
    frame.header.seq = repair->seq;
    frame.header.offset = repair->offset;
    frame.header.length = repair->length;
    frame.header.total = repair->total;
    frame.header.call = operation->call;
    frame.payload = repair->from;
    frame.owner = operation.get();
    connection.enqueue(std::move(frame));
  }
}

void Collectives::on_packets(const Multicast::Event& event) {
  if (spreads_ == nullptr || !owner_.failure().empty()) return;
  spreads_->on_event(event);
  carry_out();
}

void Collectives::lose(uint32_t peer) {
  untold_.erase(peer);
  if (spreads_ == nullptr) return;
  spreads_->lose(peer);
  carry_out();
}

}  // namespace paceline
