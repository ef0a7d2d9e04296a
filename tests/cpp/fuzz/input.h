// The fuzzer's bytes as numbers, and how a target says that it has found something.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>

namespace paceline::testing {

class Input {
 public:
  Input(const uint8_t* data, size_t size) : left_(data, size) {}

  bool empty() const { return left_.empty(); }
  std::span<const uint8_t> take(size_t size) {
    const std::span<const uint8_t> taken = left_.first(std::min(size, left_.size()));
    left_ = left_.subspan(taken.size());
    return taken;
  }
  uint8_t byte() { return static_cast<uint8_t>(number(1)); }
  // Little-endian; zeros where the input ends.
  uint64_t number(size_t bytes) {
    uint64_t value = 0;
    size_t i = 0;
    for (const uint8_t byte : take(bytes)) value |= uint64_t{byte} << (8 * i++);
    return value;
  }

 private:
  std::span<const uint8_t> left_;
};

inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "found: %s\n", what);
  std::abort();
}

}  // namespace paceline::testing
