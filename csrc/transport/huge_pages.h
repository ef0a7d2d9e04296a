// Huge pages under memory that ranks of one host read from each other (pulls.h).
//
// Such a read costs much less where the memory lies in huge pages, but torch allocates small ones. To move a buffer to
// huge pages (MADV_COLLAPSE, Linux 6.1) costs as much as some large collectives save by it. So it is done for buffers
// that come back: after a chunk was sent kOften times from small pages, the next caller that brings it moves it.
//
//   send of a chunk     in huge pages: lent. In small pages: copied, and counted (`count_small`)
//   call with a chunk   counted often enough: moved, one chunk a call (`improve`)
//   after that          counted anew, and moved again only after many more sends: memory that a program allocates anew
//                       at the same address, or shares with a forked child, is soon in small pages again
//   error               the chunk is never moved again
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#include "common/fd.h"

namespace paceline {

class HugePages {
 public:
  static constexpr uint32_t kOften = 16;

  // Without `moves`, no memory is moved: huge pages are only found.
  explicit HugePages(bool moves);

  // Whether this process's memory is in huge pages, by the page in its middle; false where the kernel does not say.
  bool hold(const void* memory, size_t bytes) const;
  // A chunk at this address was sent from small pages.
  void count_small(const void* chunk);
  // Whether there is a chunk to move. Costs nothing.
  bool due() const { return due_.load(std::memory_order_relaxed) > 0; }
  // Moves a chunk to huge pages if it is due, and returns whether it was. The caller holds the memory meanwhile. Pages
  // at the chunk's edges are moved too, if they lie within the buffer, of which the chunk is a part.
  bool improve(const void* chunk, size_t bytes, const void* buffer, size_t buffer_bytes);

 private:
  struct Tally {
    uint32_t times = 0;
    uint32_t patience = kOften;
  };

  bool moves_;
  Fd pagemap_;
  std::atomic<uint32_t> due_{0};
  std::mutex mutex_;
  std::map<const void*, Tally> tallies_;
};

}  // namespace paceline
