#include "transport/multicast/placement.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>

namespace paceline {

Placement::Placement(uint8_t* to, const Chunks& chunks)
    : to_(to), chunks_(chunks), left_(chunks.count()), there_((chunks.count() + 63) / 64) {}

void Placement::add(uint64_t chunk) {
  there_[chunk / 64] |= uint64_t{1} << chunk % 64;
  --left_;
  if (!parts_.empty()) parts_.erase(chunk);
}

bool Placement::place_chunk(uint64_t chunk, const uint8_t* bytes) {
  if (has(chunk)) return false;
  std::memcpy(to_ + chunks_.offset(chunk), bytes, chunks_.length(chunk));
  add(chunk);
  return true;
}

void Placement::place(uint64_t offset, std::span<const uint8_t> bytes) {
  const uint64_t end = offset + bytes.size();
  for (uint64_t at = offset; at < end;) {
    const uint64_t chunk = at / chunks_.size;
    const uint64_t begin = chunks_.offset(chunk);
    const uint64_t until = std::min(end, begin + chunks_.length(chunk));
    if (!has(chunk)) {
      std::memcpy(to_ + at, bytes.data() + (at - offset), until - at);
      if (until - at == chunks_.length(chunk) || join_part(chunk, at - begin, until - begin)) add(chunk);
    }
    at = until;
  }
}

bool Placement::join_part(uint64_t chunk, uint64_t from, uint64_t to) {
  std::map<uint64_t, uint64_t>& parts = parts_[chunk];
  auto next = parts.upper_bound(to);
  while (next != parts.begin() && std::prev(next)->second >= from) {  // those that it touches or overlaps
    const auto touched = std::prev(next);
    from = std::min(from, touched->first);
    to = std::max(to, touched->second);
    next = parts.erase(touched);
  }
  parts.emplace(from, to);
  return to - from == chunks_.length(chunk);
}

uint64_t Placement::end_of_run(uint64_t chunk) const {
  const uint64_t count = chunks_.count();
  const uint64_t run = has(chunk) ? ~uint64_t{0} : 0;
  while (chunk < count) {
    const uint64_t others = (there_[chunk / 64] ^ run) >> chunk % 64;
    if (others != 0) return std::min<uint64_t>(count, chunk + std::countr_zero(others));
    chunk += 64 - chunk % 64;
  }
  return count;
}

std::vector<Range> Placement::missing(size_t most) const {
  std::vector<Range> gaps;
  for (uint64_t chunk = 0; chunk < chunks_.count() && gaps.size() < most;) {
    const uint64_t end = end_of_run(chunk);
    if (!has(chunk)) {
      const uint64_t offset = chunks_.offset(chunk);
      gaps.push_back({offset, std::min(chunks_.total, chunks_.offset(end)) - offset});
    }
    chunk = end;
  }
  return gaps;
}

}  // namespace paceline
