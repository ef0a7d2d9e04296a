#include "transport/multicast/packet.h"

#include "transport/bytes.h"

namespace paceline {
namespace {

constexpr uint16_t kMagic = 'P' | 'm' << 8;
constexpr uint8_t kVersion = 1;

}  // namespace

void encode(const PacketHeader& header, std::span<uint8_t, kPacketHeaderBytes> out) {
  ByteWriter writer(out.data());
  writer.put(kMagic);
  writer.put(kVersion);
  writer.put(uint8_t{0});
  writer.put(header.group_mark);
  writer.put(header.source);
  writer.put(header.chunk);
  writer.put(header.transfer);
  writer.put(header.chunks.total);
  writer.put(header.salt);
  writer.put(header.counter);
  writer.put(static_cast<uint16_t>(header.chunks.size));
  writer.put(static_cast<uint16_t>(header.payload_bytes()));
}

bool decode(std::span<const uint8_t> packet, PacketHeader* header) {
  if (packet.size() <= kPacketOverheadBytes) return false;
  ByteReader reader(packet.data());
  if (reader.get<uint16_t>() != kMagic || reader.get<uint8_t>() != kVersion || reader.get<uint8_t>() != 0) return false;
  header->group_mark = reader.get<uint32_t>();
  header->source = reader.get<uint32_t>();
  header->chunk = reader.get<uint32_t>();
  header->transfer = reader.get<uint64_t>();
  header->chunks.total = reader.get<uint64_t>();
  header->salt = reader.get<uint64_t>();
  header->counter = reader.get<uint32_t>();
  header->chunks.size = reader.get<uint16_t>();
  const auto payload_bytes = reader.get<uint16_t>();
  return header->chunks.size > 0 && header->chunks.can_be_numbered() && header->chunk < header->chunks.count() &&
         payload_bytes == header->payload_bytes() && packet.size() == kPacketOverheadBytes + payload_bytes;
}

}  // namespace paceline
