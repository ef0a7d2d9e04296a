// Payload between two processes of one host: a ring of memory for each direction, small enough to stay in cache.
//
// Each side makes one segment, which only it writes and the other maps for reading: the payload it sends, and how much
// of the other's payload it has consumed. What lies where follows from the order of the payloads alone, so nothing that
// is read from the other's memory is trusted further than a count can be checked.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "common/fd.h"
#include "transport/stream.h"

namespace paceline {

class Rings {
 public:
  // What is put at once, at most: a payload that is longer goes in pieces.
  static constexpr size_t kPieceBytes = 128 << 10;

  // Makes this side's segment. Throws std::system_error.
  Rings();
  ~Rings();
  Rings(const Rings&) = delete;
  Rings& operator=(const Rings&) = delete;

  // This side's segment, for the other to map for reading (the kernel lets it do nothing else); not needed after that.
  int fd() const { return fd_.get(); }
  void forget_fd() { fd_.reset(); }
  // Maps the other's segment. False when it is not such a segment.
  bool open(const Fd& theirs);
  bool is_open() const { return theirs_ != nullptr; }

  // Copies a piece to the other side. False when there is no room: then the other says when there is (peer_waits).
  bool put(const uint8_t* bytes, size_t length);
  // Whether the other side has consumed something since that was asked last.
  bool made_room() const;
  // The other side claims to have consumed what it cannot have.
  bool lied_to() const { return lied_to_; }

  // Says that this side waits for room, in the ring or the stream; who says so looks once more.
  void wait_for_room();

  // Where the next piece of the other side lies, until it is released.
  const uint8_t* take(size_t length);
  void release();
  // Whether the other side waits for room and was not told yet that there is some. Asked after pieces were released.
  bool peer_waits();

  // Bytes between the same two, once both segments are known.
  Stream stream() const;

  // Nothing more goes to the other side, and what was lent to it may change: it can see that, before this returns.
  void close();
  bool peer_closed() const;

 private:
  struct Segment;

  bool has_room(uint64_t end);

  Fd fd_;
  Segment* ours_ = nullptr;
  const Segment* theirs_ = nullptr;
  uint64_t produced_ = 0, known_consumed_ = 0;
  uint64_t taken_ = 0;
  uint64_t times_waited_ = 0, times_told_ = 0;
  bool lied_to_ = false;
};

}  // namespace paceline
