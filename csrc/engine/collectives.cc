#include "engine/collectives.h"

#include <algorithm>
#include <cstring>
#include <system_error>
#include <utility>

#include "common/attempt.h"
#include "engine/engine.h"
#include "engine/group.h"

namespace paceline {
namespace {

// Frames of collectives that are not called yet are kept up to this much, headers included; beyond, the stream waits.
// Through memory only small ones are: there the rest costs nothing more when it is wanted.
// Of a peer that is at its end the rest is read, to hear why: that is what the kernels hold, and this bounds it where
// the peer only says so.
constexpr uint64_t kMostEarlyBytes = 64 << 20;
constexpr uint64_t kMostLastBytes = 64 << 20;
constexpr uint64_t kMostEarlySharedBytes = 8 << 10;

constexpr size_t kHistory = 256;

// After so many bytes of frames that came before their call, timers and others get a turn.
constexpr uint64_t kReplayedBytes = 1 << 20;

// A collective that takes longer than this may be waiting for a rank that has called another one.
constexpr auto kAskAfter = std::chrono::seconds(1);

}  // namespace

std::optional<std::string> Collectives::post(const std::shared_ptr<Operation>& operation) {
  operation->seq = next_seq_++;
  if (!owner_.failure().empty()) return std::nullopt;  // end_unposted does the rest
  operation->posted_at = Clock::now();
  operation->deadline = operation->posted_at + operation->timeout;
  operation->ask_at = operation->posted_at + kAskAfter;
  operation->element_bytes = element_bytes(operation->call.dtype);
  operation->reduction = find_reduction(operation->call.dtype, operation->call.op);
  operation->call.schedule = operation->awaits() ? 0 : operation->program->digest();
  history_.push_back(operation->call);
  if (history_.size() > kHistory) history_.pop_front();
  group_.engine().due_by(std::min(operation->deadline, operation->ask_at));
  if (lane_ == Lane::kCollective) group_.decisions().called(*operation);
  if (!owner_.failure().empty()) return std::nullopt;
  if (!operation->awaits()) {
    start(operation);
    return std::nullopt;
  }
  // Until it is known to whom it sends, later ones must not pass it on the way to anybody.
  operation->left = 1;
  operations_[operation->seq] = operation;
  for (uint32_t peer = 0; peer < group_.size(); ++peer) {
    if (peer != group_.rank()) outgoing_[peer].queues[operation->seq].left = 1;
  }
  return group_.decisions().await(operation);
}

void Collectives::end_unposted(const std::shared_ptr<Operation>& operation) noexcept {
  if (owner_.failure().empty() || operation->ended) return;
  if (!attempt([&] { operation->end(owner_.failure_of(operation->title())); })) {
    attempt([&] { operation->end("out of memory"); });
  }
}

void Collectives::begin(const std::shared_ptr<Operation>& operation, Prepared prepared) {
  if (find(operation->seq) != operation || !operation->awaits()) return;  // the group has failed meanwhile
  operation->program = std::move(prepared.program);
  operation->places = std::move(prepared.places);
  operation->call.schedule = operation->program->digest();
  const uint64_t age = next_seq_ - 1 - operation->seq;
  if (age < history_.size()) history_[history_.size() - 1 - age].schedule = operation->call.schedule;
  for (auto& [peer, outgoing] : outgoing_) {
    outgoing.queues.erase(operation->seq);
    Connection* connection = outgoing.queues.empty() ? nullptr : group_.connection(peer, lane_);
    if (connection != nullptr) group_.mark(*connection);
  }
  start(operation);
}

void Collectives::start(const std::shared_ptr<Operation>& operation) {
  const Program& program = *operation->program;
  operation->progress.resize(program.accesses().size());
  operation->left = static_cast<uint32_t>(program.accesses().size());
  if (operation->left == 0) {
    complete(operation);
    return;
  }
  for (uint32_t i = 0; program.in_order() && i < program.accesses().size(); ++i) {
    if (program.accesses()[i].write) operation->expecting.insert({program.accesses()[i].step, i});
  }
  operations_[operation->seq] = operation;
  const bool overlaps = operations_.size() > 1;
  // What is told about spreads must not be stopped by what belongs to a later operation, so one that has any keeps its
  // place in all queues until its end.
  const bool spreads = spreads_any(*operation);
  for (const Program::Peer& peer : program.peers()) {
    const auto alone = std::count_if(peer.sends.begin(), peer.sends.end(),
                                     [&](uint32_t access) { return !by_packets(*operation, access); });
    if (alone > 0 || spreads) {
      outgoing_[peer.rank].queues[operation->seq].left = static_cast<uint32_t>(alone) + (spreads ? 1 : 0);
    }
    Connection* connection = group_.connection(peer.rank, lane_);
    if (!owner_.failure().empty()) return;
    const bool says_so = asks_first() || (overlaps && !peer.receives.empty());
    if (says_so && connection != nullptr) say_called(*connection, operation->seq);
  }
  // Receivers repair each other, whom the schedule does not let talk to each other.
  for (const Spread& spread : program.spreads()) {
    if (!spreads || !by_packets(*operation, spread.accesses.front())) continue;
    for (const uint32_t receiver : spread.receivers) {
      if (receiver != group_.rank()) outgoing_[receiver].queues.try_emplace(operation->seq, Outgoing::Queue{1, {}});
    }
  }
  for (uint32_t i = 0; i < program.accesses().size(); ++i) {
    const Access& access = program.accesses()[i];
    if (!access.write && access.previous_write < 0 && !by_packets(*operation, i)) offer(operation, i);
  }
  if (spreads) begin_spreads(operation);
  group_.flush_marked();
  if (owner_.failure().empty()) replay(operation);
  for (const Program::Peer& peer : program.peers()) {
    if (!owner_.failure().empty()) return;
    if (group_.gone(peer.rank, lane_)) group_.lose(peer.rank, "");
  }
  group_.flush_marked();
}

void Collectives::say_called(Connection& connection, uint64_t seq) {
  FrameHeader header;
  header.type = FrameType::kPosted;
  header.seq = seq;
  connection.enqueue_control(header);
  group_.mark(connection);
}

void Collectives::attached(Connection& connection) {
  const auto untold = untold_.extract(connection.peer());
  if (!untold.empty()) {
    for (OutFrame& frame : untold.mapped()) connection.enqueue_urgent(std::move(frame));
  }
  if (!asks_first() && last_posted() > 0) return say_called(connection, last_posted());
  for (const auto& [seq, operation] : operations_) {
    if (asks_first() && operation->program->find_peer(connection.peer()) != nullptr) say_called(connection, seq);
  }
}

void Collectives::called_by(uint32_t peer, uint64_t seq) {
  Outgoing& outgoing = outgoing_[peer];
  outgoing.posted = std::max(outgoing.posted, seq);
}

bool Collectives::was_called_by(uint32_t peer, uint64_t seq) const {
  const auto found = outgoing_.find(peer);
  return found != outgoing_.end() && found->second.posted >= seq;
}

// How far an access may go: as far as what it waits for has gone.
uint64_t Collectives::limit(const Operation& operation, uint32_t index) const {
  const Access& access = operation.program->accesses()[index];
  uint64_t bytes = operation.places[access.chunk].bytes;
  if (access.previous_write >= 0) {
    bytes = std::min(bytes, operation.progress[static_cast<size_t>(access.previous_write)].done);
  }
  if (access.write) {
    for (uint32_t read = access.first_read; read < index; ++read) {
      bytes = std::min(bytes, operation.progress[read].done);
    }
  }
  return bytes;
}

// An access has gone on by so many bytes: so may those that wait for it.
void Collectives::advance(const std::shared_ptr<Operation>& operation, uint32_t index, uint64_t bytes) {
  const std::vector<Access>& accesses = operation->program->accesses();
  Operation::Progress& progress = operation->progress[index];
  progress.done += bytes;
  for (uint32_t next = index + 1; next < accesses[index].end; ++next) {
    if (accesses[next].write) {
      apply(operation, next);
    } else if (accesses[index].write) {
      offer(operation, next);
    }
    if (!owner_.failure().empty()) return;
  }
  if (progress.done != operation->places[accesses[index].chunk].bytes) return;
  if (accesses[index].write && operation->program->in_order()) on_received(operation, index);
  if (!owner_.failure().empty()) return;
  if (--operation->left == 0) complete(operation);
}

FrameHandler::Verdict Collectives::on_header(Connection& connection, const FrameHeader& header, uint8_t** to) {
  if (header.type == FrameType::kPosted) {
    called_by(connection.peer(), header.seq);
    group_.mark(connection);
    return FrameHandler::Verdict::kTake;
  }
  const bool of_spread = is_of_spread(header.type);
  if (of_spread && spreads_ == nullptr) {
    owner_.fail(connection.peer(), group_.who(connection.peer()) + " uses multicast, and others of the group do not");
    return FrameHandler::Verdict::kTake;
  }
  const auto found = operations_.find(header.seq);
  const bool called = found != operations_.end();
  if (of_spread && !called && header.seq < next_seq_) return take_spread_frame_of_ended(connection, header, to);
  const bool awaits = called && found->second->awaits();
  const bool replays = called && header.type != FrameType::kPulled && early_.count(header.seq) > 0;
  if (!called || awaits || replays) {
    if (called ? !header.call.fits(found->second->call) : header.seq < next_seq_) {
      disagree(connection.peer(), header.call, header.seq);
      return FrameHandler::Verdict::kTake;
    }
    if (header.type == FrameType::kPulled) {
      owner_.fail(connection.peer(), group_.who(connection.peer()) + " says that it has read memory it was not lent");
      return FrameHandler::Verdict::kTake;
    }
    const bool sent = header.type == FrameType::kData || header.type == FrameType::kRepair;
    const bool dear = header.shared && header.length > kMostEarlySharedBytes;
    const bool keep = connection.hung_up() || (!dear && early_bytes_ < kMostEarlyBytes);
    if (!keep) return FrameHandler::Verdict::kPause;
    uint64_t& last_bytes = last_bytes_[connection.peer()];
    if (connection.hung_up()) last_bytes += header.length + sizeof(Early);
    if (last_bytes > kMostLastBytes) {
      owner_.fail(connection.peer(), group_.who(connection.peer()) +
                                         " closed a connection, and sends on and on what rank " +
                                         std::to_string(group_.rank()) + " has not called");
      return FrameHandler::Verdict::kTake;
    }
    Receiving& receiving = receiving_[&connection];
    receiving.begun = receiving.early = true;
    receiving.operation.reset();
    receiving.buffer = group_.engine().scratch().take(sent ? header.length : header.streamed_bytes());
    *to = receiving.buffer.data();
    return FrameHandler::Verdict::kTake;
  }
  const std::shared_ptr<Operation>& operation = found->second;
  if (of_spread) {
    Receiving& receiving = receiving_[&connection];
    receiving = {};
    receiving.begun = true;
    if (Connection::in_place(header)) return FrameHandler::Verdict::kTake;
    receiving.buffer = group_.engine().scratch().take(header.length);
    *to = receiving.buffer.data();
    return FrameHandler::Verdict::kTake;
  }
  const int64_t access = check(connection.peer(), *operation, header);
  if (access < 0 || header.type == FrameType::kPulled) return FrameHandler::Verdict::kTake;
  Receiving& receiving = receiving_[&connection];
  receiving.begun = true;
  receiving.early = false;
  receiving.operation = operation;
  receiving.access = static_cast<uint32_t>(access);
  const Access& write = operation->program->accesses()[receiving.access];
  const bool now = limit(*operation, receiving.access) >= header.offset + header.length &&
                   operation->progress[receiving.access].done == header.offset;
  const bool adds = write.reduce && operation->reduction != nullptr;  // a barrier's bytes are nothing to add
  receiving.buffer = {};
  if (header.type == FrameType::kAt) {
    *to = reinterpret_cast<uint8_t*>(&receiving.address);
  } else if (now && !adds) {
    *to = operation->places[write.chunk].work + header.offset;  // straight to where it belongs
  } else if (!now || !Connection::in_place(header)) {
    receiving.buffer = group_.engine().scratch().take(header.length);
    *to = receiving.buffer.data();
  }
  return FrameHandler::Verdict::kTake;
}

void Collectives::on_frame(Connection& connection, const FrameHeader& header, const uint8_t* bytes) {
  if (header.type == FrameType::kPosted) return;
  const auto entry = receiving_.find(&connection);
  Receiving receiving;
  if (entry != receiving_.end()) receiving = std::exchange(entry->second, {});
  if (receiving.early) {
    early_bytes_ += receiving.buffer.size() + sizeof(Early);
    early_[header.seq].push_back({connection.peer(), header, std::move(receiving.buffer)});
    const std::shared_ptr<Operation> called = find(header.seq);  // while the frame arrived
    if (called != nullptr && !called->awaits()) replay(called);
    return;
  }
  if (is_of_spread(header.type)) {
    if (receiving.begun) on_spread_frame(connection.peer(), header, bytes != nullptr ? bytes : receiving.buffer.data());
    return;
  }
  const std::shared_ptr<Operation> operation = find(header.seq);
  if (operation == nullptr || operation->awaits()) return;
  if (header.type == FrameType::kPulled) return take_back(operation, connection.peer(), header);
  if (!receiving.begun) return;
  if (header.type == FrameType::kAt) return borrow(operation, receiving.access, header, receiving.address);
  operation->progress[receiving.access].moved += header.length;
  if (receiving.buffer.data() != nullptr) {
    take(operation, receiving.access, header.offset, header.length, std::move(receiving.buffer));
    return;
  }
  if (bytes != nullptr) write(*operation, receiving.access, header.offset, bytes, header.length);
  advance(operation, receiving.access, header.length);
}

// A slice of the frames that came before the call. After the last, those whose streams had stopped go on.
void Collectives::replay(const std::shared_ptr<Operation>& operation) {
  uint64_t replayed = 0;
  for (auto found = early_.find(operation->seq); found != early_.end(); found = early_.find(operation->seq)) {
    Early frame = std::move(found->second.front());
    found->second.pop_front();
    if (found->second.empty()) early_.erase(found);
    early_bytes_ -= frame.payload.size() + sizeof(Early);
    if (is_of_spread(frame.header.type)) {
      on_spread_frame(frame.peer, frame.header, frame.payload.data());
      if (!owner_.failure().empty()) return;
      continue;
    }
    const int64_t access = check(frame.peer, *operation, frame.header);
    if (access < 0) return;
    const auto index = static_cast<uint32_t>(access);
    if (frame.header.type == FrameType::kAt) {
      uint64_t address = 0;
      std::memcpy(&address, frame.payload.data(), sizeof(address));
      borrow(operation, index, frame.header, address);
      continue;
    }
    operation->progress[index].moved += frame.header.length;
    take(operation, index, frame.header.offset, frame.header.length, std::move(frame.payload));
    if (owner_.failure().empty()) group_.flush_marked();  // there may be many, and links must not wait for all of them
    if (!owner_.failure().empty()) return;
    replayed += frame.header.length;
    const bool enough = replayed >= kReplayedBytes || group_.engine().poller().others_wait();
    if (early_.count(operation->seq) == 0 || !enough) continue;
    replays_.push_back(operation);
    return group_.engine().nudge();
  }
  resume(*operation);
}

// Streams that stopped at a frame of this operation go on.
void Collectives::resume(const Operation& operation) {
  const std::shared_ptr<const Program> program = operation.program;  // it may end meanwhile
  for (const Program::Peer& peer : program->peers()) {
    if (!owner_.failure().empty()) return;
    Connection* connection = group_.connection(peer.rank, lane_);
    if (connection != nullptr && connection->paused()) connection->resume();
  }
}

bool Collectives::work() {
  if (!epilogues_.empty()) {
    const std::shared_ptr<Operation> operation = epilogues_.back().lock();
    epilogues_.pop_back();
    if (operation != nullptr && find(operation->seq) == operation) finalise(operation);
    group_.flush_marked();
    return true;
  }
  if (!replays_.empty()) {
    const std::shared_ptr<Operation> operation = replays_.back().lock();
    replays_.pop_back();
    if (operation != nullptr && find(operation->seq) == operation) replay(operation);
    return true;
  }
  return pull();
}

// Bytes have arrived: write them as soon as they may be written.
void Collectives::take(const std::shared_ptr<Operation>& operation, uint32_t access, uint64_t offset, uint64_t length,
                       ScratchPool::Buffer buffer) {
  const auto before = operation->arrived.find(access);
  if ((before == operation->arrived.end() || before->second.empty()) && offset + length <= limit(*operation, access)) {
    write(*operation, access, offset, buffer.data(), length);
    return advance(operation, access, length);
  }
  operation->arrived[access].push_back({offset, length, std::move(buffer)});
  apply(operation, access);
}

void Collectives::apply(const std::shared_ptr<Operation>& operation, uint32_t access) {
  if (by_packets(*operation, access)) {
    const uint32_t chunk = operation->program->accesses()[access].chunk;
    if (limit(*operation, access) == operation->places[chunk].bytes) spreads_->ready(operation->seq, access);
    return carry_out();
  }
  const auto found = operation->arrived.find(access);
  if (found == operation->arrived.end()) return;
  std::vector<Operation::Block>& blocks = found->second;
  while (!blocks.empty() && !blocks.front().lent &&
         blocks.front().offset + blocks.front().length <= limit(*operation, access)) {
    const Operation::Block block = std::move(blocks.front());
    blocks.erase(blocks.begin());
    write(*operation, access, block.offset, block.buffer.data(), block.length);
    advance(operation, access, block.length);
    if (!owner_.failure().empty()) return;
  }
  schedule_pull(operation, access);
}

void Collectives::write(Operation& operation, uint32_t index, uint64_t offset, const uint8_t* bytes, uint64_t length) {
  const Access& access = operation.program->accesses()[index];
  const Place& place = operation.places[access.chunk];
  uint8_t* to = place.work + offset;
  if (!access.reduce) {
    std::memcpy(to, bytes, length);
  } else if (operation.reduction != nullptr) {
    const uint8_t* own = (access.from_input ? place.input : place.work) + offset;
    operation.reduction(to, own, bytes, length / operation.element_bytes);
  }
}

int64_t Collectives::check(uint32_t from, const Operation& operation, const FrameHeader& header) {
  if (header.call != operation.call) {
    disagree(from, header.call, operation.seq);
    return -1;
  }
  const Program::Peer* peer = operation.program->find_peer(from);
  const bool pulled = header.type == FrameType::kPulled;
  if (peer == nullptr || header.id >= (pulled ? peer->sends : peer->receives).size()) {
    owner_.fail(from, group_.who(from) + " sent a frame that is not part of the schedule");
    return -1;
  }
  const uint32_t access = (pulled ? peer->sends : peer->receives)[header.id];
  const Operation::Progress& progress = operation.progress[access];
  if (pulled) {
    if (header.length > 0 && header.length <= progress.lent) return access;
    owner_.fail(from, group_.who(from) + " says that it has read memory it was not lent");
    return -1;
  }
  const uint64_t bytes = operation.places[operation.program->accesses()[access].chunk].bytes;
  if (header.total != bytes) {
    owner_.fail(from, group_.who(from) + " sends " + std::to_string(header.total) + " bytes where rank " +
                          std::to_string(group_.rank()) + " expects " + std::to_string(bytes) +
                          ": their sizes do not fit");
    return -1;
  }
  const bool whole = header.length % operation.element_bytes == 0 || bytes % operation.element_bytes != 0;
  if (by_packets(operation, access)) {
    owner_.fail(from, group_.who(from) + " sends to one rank what goes to many at once");
    return -1;
  }
  if (header.offset != progress.moved || header.length == 0 || header.length > bytes - header.offset || !whole) {
    owner_.fail(from, group_.who(from) + " sent a frame out of order");
    return -1;
  }
  return access;
}

void Collectives::complete(const std::shared_ptr<Operation>& operation) {
  if (spreads_ != nullptr && spreads_->owes(operation->seq)) {
    operations_[operation->seq] = operation;
    return;
  }
  // A barrier is passed only when everything called before it is done, as Gloo has it.
  if (operation->call.kind == Kind::kBarrier && !operations_.empty() && operations_.begin()->first < operation->seq) {
    operations_[operation->seq] = operation;
    return;
  }
  operation->in_epilogue = true;
  if (spreads_any(*operation)) {
    spreads_->end(operation->seq);
    for (auto& [peer, outgoing] : outgoing_) outgoing.queues.erase(operation->seq);
  }
  finalise(operation);
}

// Makes a slice of the result final, or all of it.
void Collectives::finalise(const std::shared_ptr<Operation>& operation) {
  std::string error;
  try {
    if (operation->epilogue && operation->epilogue()) {
      operations_[operation->seq] = operation;  // it may have had nobody to wait for
      epilogues_.push_back(operation);
      return group_.engine().nudge();
    }
  } catch (const std::exception& thrown) {
    error = operation->title() + ": its result cannot be stored: " + thrown.what();
  }
  conclude(operation, error);
}

void Collectives::conclude(const std::shared_ptr<Operation>& operation, const std::string& error) {
  operations_.erase(operation->seq);
  group_.engine().retire(operation);
  operation->end(error);
  group_.engine().nudge();
  if (operations_.empty()) return;
  for (const auto& [peer, outgoing] : outgoing_) {  // what waited for it
    Connection* connection = outgoing.queues.empty() ? nullptr : group_.connection(peer, lane_);
    if (connection != nullptr) group_.mark(*connection);
  }
  const std::shared_ptr<Operation> next = operations_.begin()->second;
  if (next->left == 0 && !next->in_epilogue) complete(next);
}

void Collectives::fail() noexcept {
  const auto operations = std::move(operations_);
  operations_.clear();
  untold_.clear();
  for (const auto& [seq, operation] : operations) {
    if (spreads_ != nullptr) spreads_->end(seq);
  }
  outgoing_.clear();
  early_.clear();
  early_bytes_ = 0;
  last_bytes_.clear();
  receiving_.clear();
  pulls_.clear();
  replays_.clear();
  epilogues_.clear();
  for (const auto& [seq, operation] : operations) {
    operation->left = 0;
    operation->arrived.clear();
    group_.engine().retire(operation);
    end_unposted(operation);
  }
  group_.engine().nudge();
}

bool Collectives::needs(uint32_t peer) const {
  for (const auto& [seq, operation] : operations_) {
    if (operation->awaits()) return true;
    const Program::Peer* entry = operation->program->find_peer(peer);
    if (entry == nullptr) continue;
    const Operation& one = *operation;  // clang before 16 captures no structured binding
    const auto bytes = [&one](uint32_t access) { return one.places[one.program->accesses()[access].chunk].bytes; };
    for (const uint32_t access : entry->sends) {
      if (operation->progress[access].done < bytes(access)) return true;
    }
    for (uint32_t i = 0; i < entry->receives.size(); ++i) {
      // What has arrived only awaits its turn.
      const Operation::Progress& progress = operation->progress[entry->receives[i]];
      if (progress.moved - progress.lent + kept_bytes(seq, peer, i) < bytes(entry->receives[i])) return true;
    }
  }
  return false;
}

// Bytes of a transfer that came before the call and are not looked at yet.
uint64_t Collectives::kept_bytes(uint64_t seq, uint32_t peer, uint32_t transfer) const {
  const auto kept = early_.find(seq);
  if (kept == early_.end()) return 0;
  uint64_t bytes = 0;
  for (const Early& frame : kept->second) {
    const bool of_it = frame.peer == peer && frame.header.id == transfer && frame.header.type == FrameType::kData;
    if (of_it) bytes += frame.header.length;
  }
  return bytes;
}

std::shared_ptr<Operation> Collectives::earliest(Clock::time_point Operation::* when) const {
  std::shared_ptr<Operation> first;
  for (const auto& [seq, operation] : operations_) {
    if (operation->in_epilogue) continue;
    if (first == nullptr || operation.get()->*when < first.get()->*when) first = operation;
  }
  return first;
}

void Collectives::compare(uint32_t peer, uint64_t seq, const Call& theirs) {
  const Call* ours = called(seq);
  if (ours != nullptr && !ours->fits(theirs)) disagree(peer, theirs, seq);
}

const Call* Collectives::called(uint64_t seq) const {
  if (seq >= next_seq_ || next_seq_ - 1 - seq >= history_.size()) return nullptr;
  return &history_[history_.size() - (next_seq_ - seq)];
}

std::shared_ptr<Operation> Collectives::find(uint64_t seq) const {
  const auto found = operations_.find(seq);
  return found == operations_.end() ? nullptr : found->second;
}

std::vector<uint32_t> Collectives::waits_for(const Operation& operation) const {
  if (operation.awaits()) return group_.decisions().waits_for(operation);
  std::vector<uint32_t> ranks;
  for (const Program::Peer& peer : operation.program->peers()) {
    bool waits = false;
    for (const auto* list : {&peer.sends, &peer.receives}) {
      for (const uint32_t access : *list) {
        const uint64_t bytes = operation.places[operation.program->accesses()[access].chunk].bytes;
        const Operation::Progress& progress = operation.progress[access];
        const bool write = operation.program->accesses()[access].write;
        waits = waits || (write ? progress.moved < bytes : progress.done < progress.moved);
      }
    }
    if (waits) ranks.push_back(peer.rank);
  }
  return ranks;
}

void Collectives::disagree(uint32_t peer, const Call& theirs, uint64_t seq) {
  owner_.fail(peer, mismatch(peer, theirs, seq), seq);
}

std::string Collectives::mismatch(uint32_t peer, const Call& theirs, uint64_t seq) const {
  const uint64_t age = next_seq_ - 1 - seq;
  if (seq >= next_seq_ || age >= history_.size()) {
    return group_.who(peer) + " sent a frame of collective #" + std::to_string(seq) + ", which ended long ago";
  }
  const Call& ours = history_[history_.size() - 1 - age];
  const std::string number = " as #" + std::to_string(seq);
  if (ours.text() == theirs.text() && ours.schedule != theirs.schedule) {
    return "rank " + std::to_string(group_.rank()) + " and " + group_.who(peer) + " run " + ours.text() + number +
           " by different schedules: set PACELINE_ALGORITHM and the other PACELINE_ variables alike on all ranks";
  }
  if (ours == theirs) {
    return group_.who(peer) + " sent bytes of " + ours.text() + number + ", which rank " +
           std::to_string(group_.rank()) + " has finished: the ranks differ in what they passed";
  }
  return "rank " + std::to_string(group_.rank()) + " called " + ours.text() + number + ", and rank " +
         std::to_string(peer) + " called " + theirs.text() +
         ": all ranks must call the same collectives in the same order";
}

}  // namespace paceline
