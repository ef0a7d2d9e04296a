// What one rank does in a schedule: for each of its chunks, the order of its reads (sends) and writes (receives).
//
// A schedule's steps order reads and writes of the same place and nothing else, and a step reads before it writes.
// So for one rank a chunk has a timeline of accesses, and two rules say when an access may go on:
//
//   a read waits for the write before it;
//   a write waits for the write before it and for all reads between the two.
//
// Both hold byte by byte: an access may go as far as what it waits for has gone. That is how receiving, reducing and
// sending on overlap without any slice being a unit of the schedule. Writes of one step are ordered as the schedule
// lists them, so that sums come out with the same bits in every run.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace paceline {

struct Access {
  uint32_t chunk = 0;
  uint32_t peer = 0;
  uint32_t step = 0;
  uint32_t wire = 0;  // its number among all transfers from the sender to the receiver: the same on both sides
  bool write = false;
  bool reduce = false;
  bool from_input = false;  // a read before any write, or the first write of a reduction: takes the rank's own input
  bool ahead = false;  // a write with reads of the same step: others may wait for these before they let it be written
  int32_t previous_write = -1;  // in the same timeline
  uint32_t first_read = 0;      // of a write: accesses [first_read, itself) are the reads it waits for
  uint32_t end = 0;             // accesses (itself, end) of the timeline wait for this one
  int32_t spread = -1;          // which of the program's spreads it belongs to
};

// One row of the schedule that this rank takes part in, in the schedule's order.
struct Row {
  uint32_t step = 0;
  uint32_t peer = 0;
  uint32_t chunk = 0;
  uint32_t count = 0;
  bool write = false;
  bool reduce = false;
  int64_t spread = -1;  // of a transfer that may go to many at once: the number of its first chunk's spread
};

// A chunk that goes from one rank to many others, as one of them sees it. It may be sent to all at once, or to each
// alone: the accesses of sender and receivers are there in any case.
struct Spread {
  uint32_t number = 0;  // the same on all ranks that take part
  uint32_t source = 0;
  std::vector<uint32_t> receivers;  // ascending
  uint32_t chunk = 0;
  uint32_t step = 0;
  // How many ranks send at once to the receiver that hears most, and which spread (an index) this rank must know to be
  // sent before it sends this one: the spreads of a step follow those of the step before one by one, so that no
  // receiver hears too many at once.
  uint32_t width = 1;
  int32_t after = -1;
  std::vector<uint32_t> accesses;  // on the source its reads, in the order of receivers; on a receiver its write
};

// The receivers of a row's spreads, and their source: rows name one peer only.
struct SpreadRow {
  uint32_t number = 0;
  uint32_t source = 0;
  std::vector<uint32_t> receivers;
};

class Program {
 public:
  // Throws std::invalid_argument when rows are out of range. `name` says which algorithm it is, for people.
  Program(uint32_t rank, uint32_t num_ranks, uint32_t num_chunks, uint64_t digest, std::string name,
          std::span<const Row> rows, bool in_order = false, bool in_turn = false,
          std::span<const SpreadRow> spreads = {});

  uint32_t rank() const { return rank_; }
  uint32_t num_ranks() const { return num_ranks_; }
  uint32_t num_chunks() const { return num_chunks_; }
  uint64_t digest() const { return digest_; }
  const std::string& name() const { return name_; }
  // Whether what is ready to be sent goes in the order of its steps, whoever it is for, and not far ahead of what was
  // received: where a schedule lives by its rounds, sends that share a port would make one another late.
  bool in_order() const { return in_order_; }
  // Whether it is sent only when few collectives called before it are under way: they are needed first, and what it
  // sends would take the receivers' ports from them.
  bool in_turn() const { return in_turn_; }

  const std::vector<Access>& accesses() const { return accesses_; }
  // Those that this rank takes part in, by number.
  const std::vector<Spread>& spreads() const { return spreads_; }
  // The index of a spread, or -1.
  int32_t find_spread(uint32_t number) const;

  struct Peer {
    uint32_t rank = 0;
    std::vector<uint32_t> sends;     // accesses by wire number
    std::vector<uint32_t> receives;  // accesses by wire number
  };
  const std::vector<Peer>& peers() const { return peers_; }
  const Peer* find_peer(uint32_t rank) const;
  // The same for some of a group's ranks: `members[i]` plays the part of rank i. They are all different.
  std::shared_ptr<const Program> among(std::span<const uint32_t> members) const;

  // Whether this rank writes the chunk: where that is not its result, the place needs memory of its own.
  const std::vector<bool>& written() const { return written_; }

 private:
  void gather_spreads(std::span<const SpreadRow> spreads);
  void chain_spreads();

  uint32_t rank_, num_ranks_, num_chunks_;
  uint64_t digest_;
  std::string name_;
  bool in_order_, in_turn_;
  std::vector<Access> accesses_;
  std::vector<Peer> peers_;
  std::vector<bool> written_;
  std::vector<Spread> spreads_;
};

}  // namespace paceline
