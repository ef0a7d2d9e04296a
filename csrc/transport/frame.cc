#include "transport/frame.h"

#include "transport/bytes.h"

namespace paceline {
namespace {

constexpr uint16_t kMagic = 0x6350;  // "Pc"

bool rooted(Kind kind) {
  return kind == Kind::kBroadcast || kind == Kind::kReduce || kind == Kind::kGather || kind == Kind::kScatter;
}

bool reducing(Kind kind) { return kind == Kind::kAllReduce || kind == Kind::kReduceScatter || kind == Kind::kReduce; }

}  // namespace

const char* name(Kind kind) {
  constexpr const char* kNames[] = {"allreduce", "reducescatter", "allgather", "broadcast", "reduce",
                                    "gather",    "scatter",       "alltoall",  "barrier"};
  const auto index = static_cast<size_t>(kind);
  return index < std::size(kNames) ? kNames[index] : "unknown";
}

std::string Call::text() const {
  std::string text = name(kind);
  if (kind == Kind::kBarrier) return text + "()";
  text += '(';
  text += name(dtype);
  if (kind != Kind::kAllToAll) text += "[" + std::to_string(count) + "]";
  if (reducing(kind)) text += std::string(", ") + name(op);
  if (rooted(kind)) text += ", root " + std::to_string(root);
  return text + ")";
}

bool Call::fits(const Call& other) const {
  Call same = other;
  if (schedule == 0 || other.schedule == 0) same.schedule = schedule;
  return *this == same;
}

void encode(const FrameHeader& header, std::span<uint8_t, kFrameHeaderBytes> out) {
  ByteWriter writer(out.data());
  writer.put(kMagic);
  writer.put(static_cast<uint8_t>(header.type));
  writer.put(static_cast<uint8_t>(header.shared));
  writer.put(header.id);
  writer.put(header.seq);
  writer.put(header.offset);
  writer.put(header.length);
  writer.put(header.total);
  writer.put(static_cast<uint8_t>(header.call.kind));
  writer.put(static_cast<uint8_t>(header.call.dtype));
  writer.put(static_cast<uint8_t>(header.call.op));
  writer.put(header.call.reserved);
  writer.put(header.call.root);
  writer.put(header.call.count);
  writer.put(header.call.schedule);
}

bool decode(std::span<const uint8_t, kFrameHeaderBytes> bytes, FrameHeader* header) {
  ByteReader reader(bytes.data());
  if (reader.get<uint16_t>() != kMagic) return false;
  const auto type = reader.get<uint8_t>();
  if (type < static_cast<uint8_t>(FrameType::kData) || type > static_cast<uint8_t>(FrameType::kOver)) return false;
  const auto shared = reader.get<uint8_t>();
  if (shared > 1) return false;
  header->shared = shared == 1;
  header->type = static_cast<FrameType>(type);
  header->id = reader.get<uint32_t>();
  header->seq = reader.get<uint64_t>();
  header->offset = reader.get<uint64_t>();
  header->length = reader.get<uint64_t>();
  header->total = reader.get<uint64_t>();
  header->call.kind = static_cast<Kind>(reader.get<uint8_t>());
  header->call.dtype = static_cast<DType>(reader.get<uint8_t>());
  header->call.op = static_cast<ReduceOp>(reader.get<uint8_t>());
  header->call.reserved = reader.get<uint8_t>();
  header->call.root = reader.get<int32_t>();
  header->call.count = reader.get<uint64_t>();
  header->call.schedule = reader.get<uint64_t>();
  const bool says_why = header->type == FrameType::kError || header->type == FrameType::kGivenUp;
  if (says_why && header->length > kMaxErrorBytes) return false;
  const bool bulk =
      header->type == FrameType::kData || header->type == FrameType::kMessage || header->type == FrameType::kRepair;
  const bool lists = header->type == FrameType::kLacks || header->type == FrameType::kWant;
  if (lists && (header->length > kMostRanges * kRangeBytes || header->length % kRangeBytes != 0)) return false;
  if (bulk && header->length > kMaxPayloadBytes) return false;
  if (is_of_spread(header->type) && !bulk && !lists && header->length > 0) return false;
  if (header->shared && (!bulk || header->length == 0)) return false;
  if (header->type == FrameType::kDecided && header->length > kMaxChoiceBytes) return false;
  // No sum of offset and length may wrap around.
  constexpr uint64_t kMost = uint64_t{1} << 62;
  return header->offset < kMost && header->length < kMost && header->total < kMost;
}

}  // namespace paceline
