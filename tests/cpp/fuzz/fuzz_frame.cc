// Any 72 bytes: decoding them is safe, and what is decoded can be encoded and read again.
#include <algorithm>
#include <array>

#include "input.h"
#include "transport/frame.h"

using namespace paceline;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::array<uint8_t, kFrameHeaderBytes> bytes{};
  std::copy_n(data, std::min(size, bytes.size()), bytes.begin());
  FrameHeader header;
  if (!decode(std::span<const uint8_t, kFrameHeaderBytes>(bytes), &header)) return 0;
  testing::require(!header.call.text().empty(), "a call without a name");
  testing::require(header.offset + header.length >= header.offset, "an offset and a length that wrap around");
  std::array<uint8_t, kFrameHeaderBytes> again{};
  encode(header, again);
  testing::require(again == bytes, "a frame that is encoded differently");
  return 0;
}
