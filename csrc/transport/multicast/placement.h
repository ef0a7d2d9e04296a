// Where the chunks of one transfer go, and which are there. Knows no threads and no packets.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "transport/multicast/multicast.h"
#include "transport/multicast/packet.h"

namespace paceline {

class Placement {
 public:
  Placement(uint8_t* to, const Chunks& chunks);

  const Chunks& chunks() const { return chunks_; }
  bool complete() const { return left_ == 0; }
  // A whole chunk of this transfer, with the length of this chunk. Returns false where it was there.
  bool place_chunk(uint64_t chunk, const uint8_t* bytes);
  // Any bytes of the transfer.
  void place(uint64_t offset, std::span<const uint8_t> bytes);
  // Gaps in whole chunks, ascending, at most so many.
  std::vector<Range> missing(size_t most) const;

 private:
  // Chunks from this one on that are all there, or all not there.
  uint64_t end_of_run(uint64_t chunk) const;
  bool has(uint64_t chunk) const { return (there_[chunk / 64] >> (chunk % 64) & 1) != 0; }
  // Remembers a part of a chunk; returns whether all of the chunk is there now.
  bool join_part(uint64_t chunk, uint64_t from, uint64_t to);
  // Sets the bit of a chunk that was not there.
  void add(uint64_t chunk);

  uint8_t* to_;
  Chunks chunks_;
  uint64_t left_;                // chunks that are not there
  std::vector<uint64_t> there_;  // a bit for each chunk
  // Of chunks of which a part was placed: its bytes that are there, as begin and end within the chunk, disjoint.
  std::map<uint64_t, std::map<uint64_t, uint64_t>> parts_;
};

}  // namespace paceline
