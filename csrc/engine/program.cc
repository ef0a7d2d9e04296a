#include "engine/program.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <tuple>

namespace paceline {
namespace {

struct Touch {
  uint32_t chunk;
  uint32_t step;
  bool write;
  uint32_t order;  // the schedule's own, to keep
  uint32_t peer;
  uint32_t wire;
  bool reduce;
  int64_t spread;
};

// A transfer's number has so many bits for its spread (see spreads.h).
constexpr uint32_t kMostSpreads = 1 << 24;

}  // namespace

Program::Program(uint32_t rank, uint32_t num_ranks, uint32_t num_chunks, uint64_t digest, std::string name,
                 std::span<const Row> rows, bool in_order, bool in_turn, std::span<const SpreadRow> spreads)
    : rank_(rank),
      num_ranks_(num_ranks),
      num_chunks_(num_chunks),
      digest_(digest),
      name_(std::move(name)),
      in_order_(in_order),
      in_turn_(in_turn),
      written_(num_chunks) {
  if (rank >= num_ranks || num_chunks == 0) throw std::invalid_argument("a program needs a rank and chunks");
  std::vector<Touch> touches;
  std::map<uint32_t, std::pair<uint32_t, uint32_t>> wires;  // peer -> sends and receives so far
  for (const Row& row : rows) {
    if (row.peer >= num_ranks || row.peer == rank || row.count == 0 || row.chunk >= num_chunks ||
        row.count > num_chunks - row.chunk) {
      throw std::invalid_argument("a row of the schedule is out of range");
    }
    auto& [sends, receives] = wires[row.peer];
    for (uint32_t chunk = row.chunk; chunk < row.chunk + row.count; ++chunk) {
      const uint32_t wire = row.write ? receives++ : sends++;
      const auto order = static_cast<uint32_t>(touches.size());
      const int64_t spread = row.spread < 0 ? -1 : row.spread + (chunk - row.chunk);
      touches.push_back({chunk, row.step, row.write, order, row.peer, wire, row.reduce, spread});
    }
  }
  std::sort(touches.begin(), touches.end(), [](const Touch& a, const Touch& b) {
    return std::tie(a.chunk, a.step, a.write, a.order) < std::tie(b.chunk, b.step, b.write, b.order);
  });

  for (const auto& [peer, counts] : wires) {
    peers_.push_back({peer, std::vector<uint32_t>(counts.first), std::vector<uint32_t>(counts.second)});
  }
  gather_spreads(spreads);
  accesses_.reserve(touches.size());
  for (size_t begin = 0; begin < touches.size();) {
    size_t end = begin;
    while (end < touches.size() && touches[end].chunk == touches[begin].chunk) ++end;
    int32_t last_write = -1;
    int64_t last_read_step = -1;
    for (size_t i = begin; i < end; ++i) {
      const Touch& touch = touches[i];
      Access access;
      access.chunk = touch.chunk;
      access.peer = touch.peer;
      access.step = touch.step;
      access.wire = touch.wire;
      access.write = touch.write;
      access.reduce = touch.reduce;
      access.from_input = last_write < 0;
      access.previous_write = last_write;
      access.first_read = static_cast<uint32_t>(last_write < 0 ? begin : static_cast<size_t>(last_write) + 1);
      access.ahead = touch.write && last_read_step == touch.step;
      if (touch.spread >= 0) {
        access.spread = touch.spread < kMostSpreads ? find_spread(static_cast<uint32_t>(touch.spread)) : -1;
        if (access.spread < 0) throw std::invalid_argument("a row names a spread that is not described");
        Spread& spread = spreads_[static_cast<size_t>(access.spread)];
        spread.chunk = touch.chunk;
        spread.step = touch.step;
        spread.accesses.push_back(static_cast<uint32_t>(i));
      }
      if (!touch.write) last_read_step = touch.step;
      if (touch.write) {
        last_write = static_cast<int32_t>(i);
        written_[touch.chunk] = true;
      }
      const auto peer = std::lower_bound(peers_.begin(), peers_.end(), touch.peer,
                                         [](const Peer& entry, uint32_t wanted) { return entry.rank < wanted; });
      (touch.write ? peer->receives : peer->sends)[touch.wire] = static_cast<uint32_t>(i);
      accesses_.push_back(access);
    }
    // A read lets the next write go on; a write lets the reads up to the next write, and that write, go on.
    uint32_t next = static_cast<uint32_t>(end);
    for (size_t i = end; i-- > begin;) {
      accesses_[i].end = next;
      if (accesses_[i].write) next = static_cast<uint32_t>(i) + 1;
    }
    begin = end;
  }
  chain_spreads();
}

void Program::gather_spreads(std::span<const SpreadRow> spreads) {
  for (const SpreadRow& row : spreads) {
    Spread& spread = spreads_.emplace_back();
    spread.number = row.number;
    spread.source = row.source;
    spread.receivers = row.receivers;
    std::sort(spread.receivers.begin(), spread.receivers.end());
    const bool twice = std::adjacent_find(spread.receivers.begin(), spread.receivers.end()) != spread.receivers.end();
    const bool known = spread.source < num_ranks_ && !spread.receivers.empty() && spread.receivers.back() < num_ranks_;
    if (twice || !known || spread.number >= kMostSpreads) throw std::invalid_argument("a spread is out of range");
  }
  std::sort(spreads_.begin(), spreads_.end(), [](const Spread& a, const Spread& b) { return a.number < b.number; });
}

// Says which spread goes after which, and checks that the accesses are those that source and receivers need.
void Program::chain_spreads() {
  std::map<uint32_t, std::vector<uint32_t>> waves;  // by step
  for (uint32_t i = 0; i < spreads_.size(); ++i) {
    Spread& spread = spreads_[i];
    const bool sends = spread.source == rank_;
    std::sort(spread.accesses.begin(), spread.accesses.end(),
              [this](uint32_t a, uint32_t b) { return accesses_[a].peer < accesses_[b].peer; });
    bool fits = spread.accesses.size() == (sends ? spread.receivers.size() : 1);
    for (size_t k = 0; fits && k < spread.accesses.size(); ++k) {
      const Access& access = accesses_[spread.accesses[k]];
      fits = access.write != sends && !access.reduce && !access.ahead && access.chunk == spread.chunk &&
             access.peer == (sends ? spread.receivers[k] : spread.source);
    }
    const bool receives = std::binary_search(spread.receivers.begin(), spread.receivers.end(), rank_);
    if (!fits || sends == receives) throw std::invalid_argument("the rows of a spread do not fit it");
    waves[spread.step].push_back(i);
  }
  const std::vector<uint32_t>* before = nullptr;
  for (const auto& [step, wave] : waves) {
    std::map<uint32_t, uint32_t> heard;  // by receiver: how many send to it at once
    for (const uint32_t i : wave) {
      for (const uint32_t receiver : spreads_[i].receivers) ++heard[receiver];
    }
    for (size_t k = 0; k < wave.size(); ++k) {
      Spread& spread = spreads_[wave[k]];
      for (const uint32_t receiver : spread.receivers) spread.width = std::max(spread.width, heard[receiver]);
      if (before != nullptr) spread.after = static_cast<int32_t>((*before)[k % before->size()]);
    }
    before = &wave;
  }
}

int32_t Program::find_spread(uint32_t number) const {
  const auto found = std::lower_bound(spreads_.begin(), spreads_.end(), number,
                                      [](const Spread& spread, uint32_t wanted) { return spread.number < wanted; });
  return found != spreads_.end() && found->number == number ? static_cast<int32_t>(found - spreads_.begin()) : -1;
}

const Program::Peer* Program::find_peer(uint32_t rank) const {
  const auto peer = std::lower_bound(peers_.begin(), peers_.end(), rank,
                                     [](const Peer& entry, uint32_t wanted) { return entry.rank < wanted; });
  return peer != peers_.end() && peer->rank == rank ? &*peer : nullptr;
}

std::shared_ptr<const Program> Program::among(std::span<const uint32_t> members) const {
  if (members.size() != num_ranks_) throw std::invalid_argument("a program needs as many members as it has ranks");
  auto program = std::make_shared<Program>(*this);
  program->rank_ = members[rank_];
  for (Access& access : program->accesses_) access.peer = members[access.peer];
  for (Access& access : program->accesses_) access.spread = -1;  // not all of the group's ranks would hear them
  program->spreads_.clear();
  for (Peer& peer : program->peers_) peer.rank = members[peer.rank];
  std::sort(program->peers_.begin(), program->peers_.end(),
            [](const Peer& a, const Peer& b) { return a.rank < b.rank; });
  return program;
}

}  // namespace paceline
