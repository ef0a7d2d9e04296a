// The packets of a multicast group: a header, the bytes of one chunk, a tag. Numbers are little-endian.
//
//   offset  bytes  field
//        0      2  "Pm"
//        2      1  version
//        3      1  0
//        4      4  mark of the group, so that packets of others at the same address are told apart cheaply
//        8      4  rank that sends it
//       12      4  number of the chunk; the chunk begins at this number times the chunk size
//       16      8  number of the transfer
//       24      8  bytes of the whole transfer
//       32      8  nonce: random for each sender that starts
//       40      4  nonce: counts this sender's packets
//       44      2  chunk size: payload of all chunks but the last
//       46      2  payload bytes of this packet
//       48         payload, and the tag of all before it (authentication.h)
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace paceline {

constexpr size_t kPacketHeaderBytes = 48;
constexpr size_t kTagBytes = 16;
constexpr size_t kPacketOverheadBytes = kPacketHeaderBytes + kTagBytes;
constexpr size_t kNonceAt = 32;
constexpr size_t kNonceBytes = 12;
constexpr uint32_t kMaxChunkBytes = 65535 - 40 - 8 - kPacketOverheadBytes;

// How a transfer is cut: all chunks have the same size, but the last, which has what is left.
struct Chunks {
  uint64_t total = 0;
  uint32_t size = 1;

  uint64_t count() const { return total / size + (total % size != 0 ? 1 : 0); }
  uint64_t offset(uint64_t chunk) const { return chunk * size; }
  uint32_t length(uint64_t chunk) const {
    return static_cast<uint32_t>(std::min<uint64_t>(size, total - offset(chunk)));
  }
  // Whether the numbers of its chunks fit into a packet.
  bool can_be_numbered() const { return count() <= uint64_t{UINT32_MAX} + 1; }

  bool operator==(const Chunks&) const = default;
};

struct PacketHeader {
  uint32_t group_mark = 0;
  uint32_t source = 0;
  uint32_t chunk = 0;
  uint64_t transfer = 0;
  Chunks chunks;
  uint64_t salt = 0;
  uint32_t counter = 0;

  uint32_t payload_bytes() const { return chunks.length(chunk); }
};

void encode(const PacketHeader& header, std::span<uint8_t, kPacketHeaderBytes> out);

// False when these bytes are not a packet of any group. Otherwise its chunk is one of its transfer, and the packet has
// the length of this chunk: only who sent it is not known yet.
bool decode(std::span<const uint8_t> packet, PacketHeader* header);

}  // namespace paceline
