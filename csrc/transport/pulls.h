// Reading the memory of another process of this host, where the kernel allows that: large payload takes one copy only.
//
// The kernel's work is by the page. For huge pages it is little, and one copy beats the two through a ring; for small
// ones it takes longer than the second copy.
//
// Each side says where a word of its own lies. Whoever can read the other's tells it so, and only then is lent memory.
// An address from the other side is used for nothing but reading from the process that named it.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace paceline {

class Pulls {
 public:
  // From the process at the other end of a Unix socket.
  explicit Pulls(int socket);

  // This side's word, and where it lies.
  uint64_t word() const { return word_; }
  uint64_t address() const { return reinterpret_cast<uint64_t>(&word_); }

  // Whether the other side's word can be read. Says once for all why it cannot.
  bool find(uint64_t address, uint64_t word) const;

  // Copies from the other side. Returns 0, or the error: ESRCH when its process has died.
  int read(uint64_t address, void* to, size_t bytes) const;

 private:
  pid_t process_ = 0;
  uint64_t word_ = 0;
};

}  // namespace paceline
