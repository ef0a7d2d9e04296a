// Collectives whose payload the receiver pulls from the sender's memory (transport/pulls.h).
//
// Bytes are pulled when they may be written, so that they are touched once more only to be added. The exception are
// writes of a step that also reads the place: such a write waits until others have pulled what it overwrites, and they
// may wait for this rank in the same way. These are pulled at once, to scratch. So a pull never waits for another of
// its step, except for those whose place is written before.
#include <algorithm>
#include <utility>

#include "engine/collectives.h"
#include "engine/engine.h"
#include "engine/group.h"

namespace paceline {
namespace {

// What is pulled at once: worth a call of the kernel, and in cache until it has been added. Less where ranks share
// cores: others wait for its end.
constexpr uint64_t kPulledBytes = 1 << 20, kPulledInACrowd = 256 << 10;

// The owner is told after so many bytes that it may overwrite them, and at the end.
constexpr uint64_t kAcknowledgedBytes = 2 << 20;

}  // namespace

// A peer says where payload lies.
void Collectives::borrow(const std::shared_ptr<Operation>& operation, uint32_t access, const FrameHeader& header,
                         uint64_t address) {
  operation->progress[access].moved += header.length;
  operation->progress[access].lent += header.length;
  operation->arrived[access].push_back({header.offset, header.length, {}, true, address});
  schedule_pull(operation, access);
}

// A peer has read what we lent.
void Collectives::take_back(const std::shared_ptr<Operation>& operation, uint32_t peer, const FrameHeader& header) {
  const uint32_t access = operation->program->find_peer(peer)->sends[header.id];
  operation->progress[access].lent -= header.length;
  advance(operation, access, header.length);
}

// Which block of an access can be pulled now, or -1.
int64_t Collectives::pullable(Operation& operation, uint32_t access) const {
  if (operation.progress[access].lent == 0) return -1;
  const std::vector<Operation::Block>& blocks = operation.arrived[access];
  const auto lent = std::find_if(blocks.begin(), blocks.end(), [](const auto& block) { return block.lent; });
  const bool first = lent == blocks.begin() && limit(operation, access) > lent->offset;
  return first || operation.program->accesses()[access].ahead ? lent - blocks.begin() : -1;
}

void Collectives::schedule_pull(const std::shared_ptr<Operation>& operation, uint32_t access) {
  Operation::Progress& progress = operation->progress[access];
  if (progress.queued || pullable(*operation, access) < 0) return;
  progress.queued = true;
  pulls_.emplace_back(operation, access);
  group_.engine().nudge();
}

void Collectives::acknowledge(Connection& connection, const Operation& operation, uint32_t access, uint64_t bytes) {
  FrameHeader header;
  header.type = FrameType::kPulled;
  header.id = operation.program->accesses()[access].wire;
  header.seq = operation.seq;
  header.length = bytes;
  header.call = operation.call;
  connection.enqueue_control(header);
  group_.mark(connection);
}

bool Collectives::pull() {
  if (pulls_.empty()) return false;
  const std::shared_ptr<Operation> operation = pulls_.back().first.lock();
  const uint32_t index = pulls_.back().second;
  pulls_.pop_back();
  if (operation == nullptr || find(operation->seq) != operation) return true;
  Operation::Progress& progress = operation->progress[index];
  progress.queued = false;
  const int64_t which = pullable(*operation, index);
  const Access& access = operation->program->accesses()[index];
  Connection* connection = group_.connection(access.peer, lane_);
  if (which < 0 || connection == nullptr) return true;

  std::vector<Operation::Block>& blocks = operation->arrived[index];
  const auto block = blocks.begin() + which;
  const uint64_t allowed = limit(*operation, index);
  const uint64_t offset = block->offset;
  const bool now = which == 0 && allowed > offset;
  const uint64_t most = group_.engine().crowded() ? kPulledInACrowd : kPulledBytes;
  const uint64_t length = std::min({most, block->length, now ? allowed - offset : block->length});
  const bool direct = now && !access.reduce;
  ScratchPool::Buffer buffer;
  if (!direct) buffer = group_.engine().scratch().take(length);
  uint8_t* to = direct ? operation->places[access.chunk].work + offset : buffer.data();
  if (!connection->pull(block->address, to, length)) return true;
  progress.lent -= length;
  block->offset += length;
  block->address += length;
  block->length -= length;
  block->unacknowledged += length;
  if (block->length == 0 || block->unacknowledged >= kAcknowledgedBytes) {
    acknowledge(*connection, *operation, index, std::exchange(block->unacknowledged, 0));
  }
  const auto rest = block->length == 0 ? blocks.erase(block) : block;
  if (now) {
    schedule_pull(operation, index);  // below whatever this slice lets go on
    if (!direct) write(*operation, index, offset, buffer.data(), length);
    advance(operation, index, length);
  } else {
    blocks.insert(rest, {offset, length, std::move(buffer)});
  }
  if (owner_.failure().empty()) apply(operation, index);
  group_.flush_marked();
  return true;
}

}  // namespace paceline
