// One collective in flight on one rank: its program, its places in memory, and how far each access has gone.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/program.h"
#include "engine/scratch.h"
#include "reduce/reduce.h"
#include "transport/frame.h"

namespace paceline {

using Clock = std::chrono::steady_clock;

// Where a chunk lives on this rank. Reads before the first write take `input`, all others `work`; the two are the
// same where a collective works in place. A chunk without elements has one byte that nobody looks at: a transfer of
// nothing could not be told from one that has not come.
struct Place {
  const uint8_t* input = nullptr;
  uint8_t* work = nullptr;
  uint64_t bytes = 0;
};

// How a collective is run once that is known.
struct Prepared {
  std::shared_ptr<const Program> program;
  std::vector<Place> places;
};

// Operations of teams have numbers from here on: their callers count them, and the group counts its own.
constexpr uint64_t kFirstOfTeams = uint64_t{1} << 63;

// "allreduce #812"
inline std::string title(Kind kind, uint64_t seq) {
  const bool of_team = seq >= kFirstOfTeams;
  return std::string(of_team ? "partial " : "") + name(kind) + " #" +
         std::to_string(of_team ? seq - kFirstOfTeams : seq);
}

struct Operation {
  // Set by the caller.
  Call call;
  std::shared_ptr<const Program> program;
  std::vector<Place> places;  // one a chunk; those the rank does not touch may be empty
  std::chrono::milliseconds timeout{0};
  uint64_t number = 0;  // of an operation of a team (teams.h), whose program names its members; otherwise 0
  // Set instead of program and places where the operation awaits a decision (decisions.h): makes both from the choice,
  // or returns nothing if that would take long and `may_wait` is false. It throws where the choice makes no sense.
  std::function<std::optional<Prepared>(const std::string& choice, bool may_wait)> prepare;
  std::vector<ScratchPool::Buffer> memory;  // of places that are nobody's tensor
  // Called by the progress thread or a caller's. The first makes a slice of the result final, and returns whether there
  // is more to do; the second is called once, and gets an empty string, or what went wrong.
  std::function<bool()> epilogue;
  std::function<void(const std::string& error)> on_done;

  // Set by the engine.
  uint64_t seq = 0;
  uint64_t turn = 0;  // its number among those that await a decision
  Clock::time_point posted_at, deadline;
  Clock::time_point ask_at;  // when to ask those it waits for whether they are in the same collective
  Reduction reduction = nullptr;
  size_t element_bytes = 1;

  struct Progress {
    uint64_t done = 0;   // bytes that nothing has to wait for any more
    uint64_t moved = 0;  // read: bytes handed to the connection; write: bytes received
    bool lends = false;  // read: the peer is told where the bytes lie
    uint64_t lent = 0;   // read: bytes that the peer is to pull; write: bytes that are to be pulled from it
    bool queued = false;
  };
  std::vector<Progress> progress;  // one an access
  uint32_t left = 0;               // accesses not done
  bool in_epilogue = false;        // none is left, and the result is being made final
  bool ended = false;
  // Of a program that sends in order: reads with bytes that are ready, and not with the kernel yet, by step.
  std::set<std::pair<uint32_t, uint32_t>> sending;
  // Of such a program: writes that are not done, and reads that wait for some of them, by step (see `in_round`).
  std::set<std::pair<uint32_t, uint32_t>> expecting, held;

  // Bytes that have arrived before they may be written, or that lie with the peer, to be pulled.
  struct Block {
    uint64_t offset = 0;
    uint64_t length = 0;
    ScratchPool::Buffer buffer;
    // Of what is to be pulled: where it lies, and how many bytes before it were pulled and the peer was not told of.
    bool lent = false;
    uint64_t address = 0;
    uint64_t unacknowledged = 0;
  };
  std::map<uint32_t, std::vector<Block>> arrived;  // the first is the next

  bool awaits() const { return program == nullptr; }
  std::string title() const { return paceline::title(call.kind, seq); }
  // Tells the caller, the first time.
  void end(const std::string& error) {
    memory.clear();
    if (!std::exchange(ended, true)) on_done(error);
  }
};

}  // namespace paceline
