#include "transport/huge_pages.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <limits>

namespace paceline {
namespace {

constexpr uint64_t kPage = 4096, kHugePage = 2 << 20;
constexpr int kCollapse = 25;  // MADV_COLLAPSE, Linux 6.1, which older headers do not have
constexpr uint32_t kNever = std::numeric_limits<uint32_t>::max();
constexpr uint32_t kMorePatience = 8;
constexpr size_t kMostTallies = 4096;  // a program with more chunks than that does not come back to them

// PAGEMAP_SCAN of linux/fs.h, which is newer than many systems' headers: which pages of a range are huge.
constexpr uint64_t kHuge = 1 << 6;
struct ScanRequest {
  uint64_t size = sizeof(ScanRequest);
  uint64_t flags = 0;
  uint64_t start = 0, end = 0, walked_to = 0;
  uint64_t regions = 0, num_regions = 1, most_pages = 0;
  uint64_t inverted = 0, wanted = kHuge, wanted_any = 0, told = kHuge;
};
const unsigned long kScan = _IOWR('f', 16, ScanRequest);

uint64_t round_down(uint64_t address) { return address / kHugePage * kHugePage; }
uint64_t round_up(uint64_t address) { return round_down(address + kHugePage - 1); }

}  // namespace

HugePages::HugePages(bool moves) : moves_(moves), pagemap_(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC)) {}

bool HugePages::hold(const void* memory, size_t bytes) const {
  std::array<uint64_t, 3> region{};
  ScanRequest request;
  request.start = (reinterpret_cast<uint64_t>(memory) + bytes / 2) / kPage * kPage;
  request.end = request.start + kPage;
  request.regions = reinterpret_cast<uint64_t>(region.data());
  return pagemap_ && ::ioctl(pagemap_.get(), kScan, &request) == 1;
}

void HugePages::count_small(const void* chunk) {
  if (!moves_) return;
  const std::lock_guard lock(mutex_);
  if (tallies_.size() >= kMostTallies) {
    tallies_.clear();
    due_ = 0;
  }
  Tally& tally = tallies_[chunk];
  if (tally.patience != kNever && ++tally.times == tally.patience) ++due_;
}

bool HugePages::improve(const void* chunk, size_t bytes, const void* buffer, size_t buffer_bytes) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = tallies_.find(chunk);
    if (found == tallies_.end() || found->second.times < found->second.patience) return false;
    --due_;
    Tally& tally = found->second;
    tally.times = 0;
    tally.patience = tally.patience > kNever / kMorePatience ? kNever : tally.patience * kMorePatience;
  }
  const auto begin = reinterpret_cast<uint64_t>(chunk), whole = reinterpret_cast<uint64_t>(buffer);
  const uint64_t from = std::max(round_down(begin), round_up(whole));
  const uint64_t to = std::min(round_up(begin + bytes), round_down(whole + buffer_bytes));
  void* memory = reinterpret_cast<void*>(from);  // NOLINT(performance-no-int-to-ptr)
  // EAGAIN: some of the pages could not be moved just then, and the others were.
  if (from < to && (::madvise(memory, to - from, kCollapse) == 0 || errno == EAGAIN)) return true;
  const std::lock_guard lock(mutex_);
  tallies_[chunk].patience = kNever;
  return true;
}

}  // namespace paceline
