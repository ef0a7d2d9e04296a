// Collectives, the sending side: what goes to whom, in which order.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "engine/collectives.h"
#include "engine/engine.h"
#include "engine/group.h"

namespace paceline {
namespace {

// A send of an earlier step that makes no progress for so long does not keep others waiting: its receiver may be late.
constexpr auto kGiveWay = std::chrono::milliseconds(20);

// How many steps a program that lives by its rounds may send ahead of what it has received, for each rank. Fewer leave
// ports idle; with no limit at all, ranks that fell behind stayed behind, and an exchange could take 1.5 times as long.
constexpr uint32_t kRoundsAhead = 2;

// How many collectives before it may be under way when one that is sent in turn begins: the last bytes of one must not
// leave the links idle.
constexpr std::ptrdiff_t kCollectivesAhead = 1;

}  // namespace

// A read has bytes to send: queue it at its peer.
void Collectives::offer(const std::shared_ptr<Operation>& operation, uint32_t index) {
  const Access& access = operation->program->accesses()[index];
  Operation::Progress& progress = operation->progress[index];
  const uint64_t ready = limit(*operation, index);
  const uint64_t bytes = operation->places[access.chunk].bytes;
  if (by_packets(*operation, index)) {
    if (ready == bytes) spreads_->ready(operation->seq, index);
    return carry_out();
  }
  if (progress.queued || ready == progress.moved) return;
  if (!in_round(*operation, access.step)) {
    operation->held.insert({access.step, index});
    return;
  }
  Connection* connection = group_.connection(access.peer, lane_);
  if (connection != nullptr && ready < bytes && ready - progress.moved < connection->slice_bytes()) return;
  progress.queued = true;
  // What belongs to an earlier step goes first, also when it became ready later: others wait for it.
  std::vector<uint32_t>& queue = outgoing_[access.peer].queues[operation->seq].ready;
  const std::vector<Access>& all = operation->program->accesses();
  queue.insert(std::upper_bound(queue.begin(), queue.end(), index,
                                [&](uint32_t a, uint32_t b) { return all[a].step < all[b].step; }),
               index);
  if (operation->program->in_order()) operation->sending.insert({access.step, index});
  if (connection != nullptr) group_.mark(*connection);
}

// Whether a send is near enough to what this rank has still to receive. Who is ahead waits, as what it would send
// takes the receiver's port from those that are behind, and puts them further behind. The earliest step of all that
// are not done is near enough on every rank, so nobody waits for ever.
bool Collectives::in_round(const Operation& operation, uint32_t step) {
  const uint64_t ahead = uint64_t{kRoundsAhead} * operation.program->num_ranks();
  return operation.expecting.empty() || step <= operation.expecting.begin()->first + ahead;
}

// A write is done: reads that were held may go.
void Collectives::on_received(const std::shared_ptr<Operation>& operation, uint32_t index) {
  operation->expecting.erase({operation->program->accesses()[index].step, index});
  while (!operation->held.empty() && in_round(*operation, operation->held.begin()->first)) {
    const uint32_t next = operation->held.begin()->second;
    operation->held.erase(operation->held.begin());
    offer(operation, next);
  }
}

// Frames of a later collective may overtake those of an earlier one only when the peer has called it: otherwise the
// stream could stop at them while the peer waits for what is behind. Behind may also be that we have read what it
// lends.
void Collectives::on_room(Connection& connection) {
  hand_over_repairs(connection);
  const auto found = outgoing_.find(connection.peer());
  if (found == outgoing_.end()) return;
  Outgoing& outgoing = found->second;
  bool first = true;
  for (auto entry = outgoing.queues.begin(); entry != outgoing.queues.end() && connection.has_room();) {
    const uint64_t seq = entry->first;
    if (!first && (seq > outgoing.posted || !connection.idle())) break;
    if (asks_first() && seq > outgoing.posted) break;
    if (seq > outgoing.posted && connection.shares_memory() && expects(connection.peer(), seq)) break;
    const auto operation = operations_.find(seq);
    if (operation == operations_.end()) break;
    if (!connection.shares_memory() && !is_its_turn(*operation->second)) break;
    Outgoing::Queue& queue = entry->second;
    while (!queue.ready.empty() && connection.has_room()) {
      const uint32_t access = queue.ready.front();
      if (gives_way(*operation->second, access)) break;
      hand_over(connection, operation->second, access);
      const Operation::Progress& progress = operation->second->progress[access];
      if (progress.queued) continue;
      queue.ready.erase(queue.ready.begin());
      if (progress.moved == operation->second->places[operation->second->program->accesses()[access].chunk].bytes) {
        --queue.left;
      }
    }
    if (queue.left == 0) {
      entry = outgoing.queues.erase(entry);
    } else {
      first = false;
      ++entry;
    }
  }
}

bool Collectives::is_its_turn(const Operation& operation) const {
  if (operation.awaits() || !operation.program->in_turn()) return true;
  return std::distance(operations_.begin(), operations_.find(operation.seq)) <= kCollectivesAhead;
}

// Whether something of the peer is still to come for a collective before this one.
bool Collectives::expects(uint32_t peer, uint64_t seq) const {
  for (const auto& [earlier, operation] : operations_) {
    if (earlier >= seq) return false;
    const Program::Peer* entry = operation->awaits() ? nullptr : operation->program->find_peer(peer);
    if (entry == nullptr) continue;
    for (const uint32_t access : entry->receives) {
      const Operation::Progress& progress = operation->progress[access];
      const uint64_t bytes = operation->places[operation->program->accesses()[access].chunk].bytes;
      if (progress.moved - progress.lent < bytes) return true;
    }
  }
  return false;
}

// One frame of a read's bytes; clears `queued` when nothing more is ready.
void Collectives::hand_over(Connection& connection, const std::shared_ptr<Operation>& operation, uint32_t index) {
  const Access& access = operation->program->accesses()[index];
  const Place& place = operation->places[access.chunk];
  Operation::Progress& progress = operation->progress[index];
  const uint64_t ready = limit(*operation, index);
  OutFrame frame;
  FrameHeader& header = frame.header;
  const uint8_t* from = (access.from_input ? place.input : place.work) + progress.moved;
  if (progress.moved == 0) {  // one way for all its bytes
    progress.lends = connection.lends() && group_.engine().worth_lending(from, place.bytes);
  }
  const bool lends = progress.lends;
  header.type = lends ? FrameType::kAt : FrameType::kData;
  header.id = access.wire;
  header.seq = operation->seq;
  header.offset = progress.moved;
  header.length = lends ? ready - progress.moved : std::min(ready - progress.moved, connection.slice_bytes());
  header.total = place.bytes;
  header.call = operation->call;
  if (lends) {
    const auto address = reinterpret_cast<uint64_t>(from);
    frame.owned.resize(sizeof(address));
    std::memcpy(frame.owned.data(), &address, sizeof(address));
    progress.lent += header.length;
  } else {
    frame.payload = from;
    frame.owner = operation.get();
  }
  progress.moved += header.length;
  progress.queued = progress.moved < ready;
  connection.enqueue(std::move(frame));
}

// Whether a send waits for those of earlier steps: all that could go now, except to peers that take nothing.
bool Collectives::gives_way(const Operation& operation, uint32_t index) {
  const uint32_t step = operation.program->accesses()[index].step;
  if (operation.sending.empty() || operation.sending.begin()->first >= step) return false;
  const Clock::time_point now = Clock::now();
  for (const auto& [earlier, access] : operation.sending) {
    if (earlier >= step) return false;
    const uint32_t peer = operation.program->accesses()[access].peer;
    const Outgoing& outgoing = outgoing_[peer];
    const bool first = outgoing.queues.empty() || outgoing.queues.begin()->first >= operation.seq;
    if ((!first || asks_first()) && outgoing.posted < operation.seq) continue;  // as on_room has it
    const Connection* connection = group_.connection(peer, lane_);
    if (connection == nullptr || connection->shares_memory()) continue;
    const Clock::time_point since = connection->blocked_since();
    if (since != Clock::time_point::max() && now - since > kGiveWay) continue;
    give_way_until_ = now + kGiveWay;
    group_.engine().due_by(give_way_until_);
    return true;
  }
  return false;
}

void Collectives::let_others_send(const Operation& operation) {
  for (const auto& [peer, outgoing] : outgoing_) {
    const auto queue = outgoing.queues.find(operation.seq);
    if (queue == outgoing.queues.end() || queue->second.ready.empty()) continue;
    Connection* connection = group_.connection(peer, lane_);
    if (connection != nullptr) group_.mark(*connection);
  }
}

Clock::time_point Collectives::tick(Clock::time_point now) {
  if (now < give_way_until_) return give_way_until_;
  give_way_until_ = Clock::time_point::max();
  for (const auto& [seq, operation] : operations_) {
    if (!operation->sending.empty()) let_others_send(*operation);
  }
  group_.flush_marked();
  return give_way_until_;
}

void Collectives::on_sent(Connection& connection, const OutFrame& frame) {
  if (frame.header.type == FrameType::kRepair) {
    spreads_->on_repaired(connection.peer(), frame.header.seq, frame.header.length);
    return carry_out();
  }
  const bool lent = frame.header.type == FrameType::kAt;
  if (frame.header.type != FrameType::kData && !lent) return;
  const std::shared_ptr<Operation> operation = find(frame.header.seq);  // held: this may be its last byte
  if (operation == nullptr) return;
  const Program::Peer* peer = operation->program->find_peer(connection.peer());
  const uint32_t index = peer->sends[frame.header.id];
  const Operation::Progress& progress = operation->progress[index];
  if (operation->program->in_order() && !progress.queued &&
      (lent || progress.done + frame.header.length == progress.moved)) {
    operation->sending.erase({operation->program->accesses()[index].step, index});
    let_others_send(*operation);
  }
  if (!lent) advance(operation, index, frame.header.length);  // otherwise when it was pulled
}

}  // namespace paceline
