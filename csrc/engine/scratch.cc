#include "engine/scratch.h"

#include <algorithm>
#include <bit>

#include "common/attempt.h"

namespace paceline {
namespace {

constexpr size_t kMostFreeBytes = size_t{256} << 20;
constexpr size_t kLeastBytes = 4096;

}  // namespace

ScratchPool::Buffer& ScratchPool::Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    if (data_) pool_->give(std::move(data_), size_);
    data_ = std::move(other.data_);
    size_ = other.size_;
    pool_ = other.pool_;
  }
  return *this;
}

ScratchPool::Buffer::~Buffer() {
  if (data_) pool_->give(std::move(data_), size_);
}

ScratchPool::Buffer ScratchPool::take(size_t size) {
  const size_t rounded = std::bit_ceil(std::max(size, kLeastBytes));
  Buffer buffer;
  buffer.pool_ = this;
  buffer.size_ = rounded;
  for (auto entry = free_.rbegin(); entry != free_.rend(); ++entry) {
    if (entry->first != rounded) continue;
    buffer.data_ = std::move(entry->second);
    free_.erase(std::next(entry).base());
    free_bytes_ -= rounded;
    return buffer;
  }
  buffer.data_.reset(new uint8_t[rounded]);  // make_unique would clear it
  return buffer;
}

void ScratchPool::give(std::unique_ptr<uint8_t[]> data, size_t size) noexcept {
  if (!attempt([&] { free_.emplace_back(size, std::move(data)); })) return;
  free_bytes_ += size;
  while (free_bytes_ > kMostFreeBytes) {
    free_bytes_ -= free_.front().first;
    free_.erase(free_.begin());
  }
}

}  // namespace paceline
