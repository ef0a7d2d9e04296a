// Little-endian numbers in byte strings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace paceline {

class ByteWriter {
 public:
  explicit ByteWriter(uint8_t* at) : at_(at) {}
  template <typename T>
  void put(T value) {
    const auto bits = static_cast<uint64_t>(value);
    for (size_t i = 0; i < sizeof(T); ++i) *at_++ = static_cast<uint8_t>(bits >> (8 * i));
  }

 private:
  uint8_t* at_;
};

class ByteReader {
 public:
  explicit ByteReader(const uint8_t* at) : at_(at) {}
  template <typename T>
  T get() {
    uint64_t bits = 0;
    for (size_t i = 0; i < sizeof(T); ++i) bits |= uint64_t{*at_++} << (8 * i);
    return static_cast<T>(bits);
  }

 private:
  const uint8_t* at_;
};

}  // namespace paceline
