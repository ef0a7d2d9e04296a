// Ranks of a group, each an engine of its own inside this process, and small schedules for them to run.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/group.h"
#include "engine/operation.h"
#include "engine/program.h"

namespace paceline::testing {

// The error of an operation, or an empty string; a sentence of our own when it does not end in time.
class Pending {
 public:
  explicit Pending(std::future<std::string> result) : result_(result.share()) {}
  std::string wait(std::chrono::milliseconds limit = std::chrono::seconds(60)) const;
  bool ready() const { return result_.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }

 private:
  std::shared_future<std::string> result_;
};

// One transfer of a schedule, as paceline.ir has it.
struct Transfer {
  uint32_t step, from, to, chunk, count;
  bool reduce;
};

// One chunk from one rank to all others at once.
struct SpreadTransfer {
  uint32_t step, from, chunk;
};

struct Schedule {
  std::string name;
  uint32_t num_chunks = 1;
  std::vector<Transfer> transfers;
  bool in_order = false;
  bool in_turn = false;
  std::vector<SpreadTransfer> spreads = {};

  std::shared_ptr<const Program> program(uint32_t rank, uint32_t num_ranks) const;
};

Schedule swap_all_reduce();                                          // two ranks, one step: both send, both add
Schedule swap_in_rounds(uint32_t num_chunks);                        // the same, a chunk a step, sent in order
Schedule ring_all_reduce(uint32_t num_ranks);                        // 2 (n - 1) steps, n chunks
Schedule direct_all_reduce(uint32_t num_ranks);                      // one step: all to all, all add
Schedule chain_broadcast(uint32_t num_ranks, uint32_t num_chunks);   // from rank 0 down the line
Schedule multicast_broadcast(uint32_t num_chunks);                   // from rank 0 to all at once, a chunk a step
Schedule multicast_all_gather(uint32_t num_ranks, uint32_t chains);  // each rank to all, `chains` of them at a time
// First down a line, rank by rank, and then from its end to all at once: writes that follow reads.
Schedule multicast_behind_chain(uint32_t num_ranks);

// How a buffer is cut into chunks; one without elements has a byte that nobody reads, as the backend has it.
std::vector<Place> cut(uint8_t* data, uint64_t count, uint64_t element_bytes, uint32_t num_chunks, uint8_t* nothing);

struct RankOptions {
  bool shm = false;
  std::chrono::milliseconds timeout = std::chrono::seconds(30);
};

class Ranks {
 public:
  Ranks(uint32_t size, RankOptions options);
  ~Ranks();

  uint32_t size() const { return static_cast<uint32_t>(engines_.size()); }
  // A new group of all ranks; returns its number.
  size_t add_group();

  // From now on the group's spreads go by multicast on loopback. A packet for which the filter says no is lost on its
  // way to this rank.
  using Filter = std::function<bool(uint32_t rank, std::span<const uint8_t> packet)>;
  void spread_by_multicast(size_t group = 0, const Filter& filter = {}, PacketRates rates = {400'000'000, 400'000'000});

  Engine& engine(uint32_t rank) { return *engines_[rank]; }
  const std::shared_ptr<Group>& group(uint32_t rank, size_t number = 0) { return groups_[number][rank]; }

  Pending post(uint32_t rank, const std::shared_ptr<Operation>& operation, size_t group = 0, bool later = true);
  Pending send(uint32_t rank, uint32_t to, uint32_t tag, std::vector<uint8_t>& bytes, size_t group = 0);
  // `from` may be -1. The sender is stored in `*sender` if that is given.
  Pending receive(uint32_t rank, int64_t from, uint32_t tag, std::vector<uint8_t>& bytes, size_t group = 0,
                  int64_t* sender = nullptr, std::chrono::milliseconds timeout = std::chrono::seconds(30));
  // Ends the rank without a word, as the death of its process does.
  void kill(uint32_t rank);
  // A new process in the place of one that was killed: it joins the first group, and all are told where it is.
  void revive(uint32_t rank);
  // Returns what the engine says at the end.
  std::string leave(uint32_t rank, size_t group = 0);

 private:
  RankOptions options_;
  std::vector<std::unique_ptr<Engine>> engines_;
  std::vector<std::vector<std::shared_ptr<Group>>> groups_;  // by number and rank
  std::vector<std::vector<bool>> left_;
};

// A membership of a group with a number of its own, without addresses.
Membership membership(uint32_t rank, uint32_t size);

// An all-reduce, broadcast or all-gather of int32 that checks itself: every rank's buffer, what was in it, what must
// be.
class Job {
 public:
  Job(const Schedule& schedule, Kind kind, uint32_t num_ranks, uint64_t count, uint32_t seed);

  std::shared_ptr<Operation> operation(uint32_t rank) const;
  // Whether the buffers of all ranks hold the result.
  bool right() const;

 private:
  Kind kind_;
  uint64_t count_;
  std::vector<std::shared_ptr<const Program>> programs_;
  mutable std::vector<std::vector<int32_t>> buffers_;
  mutable std::vector<uint8_t> nothing_;
  std::vector<int32_t> expected_;
};

std::vector<uint8_t> random_bytes(size_t size, uint32_t seed);

// Whether an error says so.
inline bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace paceline::testing
