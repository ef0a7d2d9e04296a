// Buffers that come and go with slices and operations: kept for the next use, so that hot ones stay in cache and
// large ones keep their pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace paceline {

class ScratchPool {
 public:
  class Buffer {
   public:
    Buffer() = default;
    Buffer(Buffer&&) noexcept = default;
    Buffer& operator=(Buffer&& other) noexcept;
    ~Buffer();

    uint8_t* data() const { return data_.get(); }
    size_t size() const { return size_; }

   private:
    friend class ScratchPool;
    std::unique_ptr<uint8_t[]> data_;
    size_t size_ = 0;
    ScratchPool* pool_ = nullptr;
  };

  // At least `size` bytes, uninitialised.
  Buffer take(size_t size);

 private:
  void give(std::unique_ptr<uint8_t[]> data, size_t size) noexcept;

  // Free buffers, most recently used last; sizes are powers of two.
  std::vector<std::pair<size_t, std::unique_ptr<uint8_t[]>>> free_;
  size_t free_bytes_ = 0;
};

}  // namespace paceline
