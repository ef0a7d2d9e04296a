#include "transport/stream.h"

#include <algorithm>
#include <cstring>

namespace paceline {
namespace {

// Calls `copy(part, position, length)` for runs of bytes that wrap neither a part nor the ring; returns their sum.
template <typename Copy>
size_t run_through(std::span<const iovec> parts, uint64_t position, uint64_t limit, const Copy& copy) {
  size_t done = 0;
  for (const iovec& part : parts) {
    for (size_t at = 0; at < part.iov_len && done < limit;) {
      const uint64_t offset = (position + done) % Stream::kBytes;
      const size_t length = std::min({part.iov_len - at, limit - done, Stream::kBytes - offset});
      copy(static_cast<uint8_t*>(part.iov_base) + at, offset, length);
      at += length;
      done += length;
    }
  }
  return done;
}

}  // namespace

size_t Stream::write(std::span<const iovec> parts) {
  const uint64_t received = theirs_.received.load();
  if (received < known_received_ || received > sent_) lied_to_ = true;
  if (lied_to_) return 0;
  known_received_ = received;
  const auto copy = [this](const uint8_t* bytes, uint64_t offset, size_t length) {
    std::memcpy(ours_.bytes + offset, bytes, length);
  };
  const size_t done = run_through(parts, sent_, kBytes - (sent_ - received), copy);
  if (done > 0) ours_.sent.store(sent_ += done);
  return done;
}

bool Stream::finds_sleeper() {
  const uint64_t sleeps = theirs_.sleeps.load();
  if (sleeps % 2 == 0 || sleeps == woken_) return false;
  woken_ = sleeps;
  return true;
}

size_t Stream::read(std::span<const iovec> parts) {
  const uint64_t sent = std::min(theirs_.sent.load(), end_);
  if (sent < received_ || sent - received_ > kBytes) lied_to_ = true;
  if (lied_to_) return 0;
  const auto copy = [this](uint8_t* to, uint64_t offset, size_t length) {
    std::memcpy(to, theirs_.bytes + offset, length);
  };
  const size_t done = run_through(parts, received_, sent - received_, copy);
  if (done > 0) ours_.received.store(received_ += done);
  return done;
}

}  // namespace paceline
