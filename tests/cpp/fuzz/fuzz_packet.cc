// Any bytes as packets of multicast: decoding is safe, what is decoded can be encoded again, and a chunk that fits a
// transfer goes to its place and nowhere else.
#include <algorithm>
#include <vector>

#include "input.h"
#include "transport/multicast/packet.h"
#include "transport/multicast/placement.h"

using namespace paceline;

namespace {

constexpr uint8_t kUntouched = 0x5a;
constexpr size_t kMargin = 64;
constexpr uint64_t kMostBytes = 1 << 12;  // of a transfer for which there is memory

void place(const PacketHeader& header, const uint8_t* payload) {
  const Chunks& chunks = header.chunks;
  std::vector<uint8_t> memory(chunks.total + 2 * kMargin, kUntouched);
  std::vector<uint8_t> expected = memory;
  const auto at = static_cast<std::ptrdiff_t>(kMargin + chunks.offset(header.chunk));
  std::copy_n(payload, header.payload_bytes(), expected.begin() + at);
  Placement placement(memory.data() + kMargin, chunks);
  testing::require(placement.place_chunk(header.chunk, payload), "a chunk that is there before it came");
  testing::require(!placement.place_chunk(header.chunk, payload), "a chunk that comes twice");
  testing::require(memory == expected, "bytes at another place");
  uint64_t gaps = 0;
  for (const Range& gap : placement.missing(SIZE_MAX)) gaps += gap.bytes;
  testing::require(gaps == chunks.total - header.payload_bytes(), "gaps that are not what is missing");
  testing::require(placement.complete() == (gaps == 0), "complete with gaps");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span<const uint8_t> packet(data, size);
  PacketHeader header;
  if (!decode(packet, &header)) return 0;
  testing::require(packet.size() == kPacketOverheadBytes + header.payload_bytes(), "a packet of another length");
  testing::require(header.payload_bytes() > 0 && header.payload_bytes() <= header.chunks.size,
                   "a payload that is no chunk");
  testing::require(header.chunks.offset(header.chunk) + header.payload_bytes() <= header.chunks.total,
                   "a chunk outside of its transfer");
  std::array<uint8_t, kPacketHeaderBytes> again{};
  encode(header, again);
  testing::require(std::equal(again.begin(), again.end(), packet.begin()), "a packet that is encoded differently");
  if (header.chunks.total <= kMostBytes) place(header, data + kPacketHeaderBytes);
  return 0;
}
