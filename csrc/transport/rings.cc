#include "transport/rings.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>

#include "common/system_error.h"

namespace paceline {
namespace {

constexpr uint64_t kRingBytes = 1 << 20;
constexpr uint64_t kAlignment = 64;
// Nobody can take mapped pages away, nor map them for writing any more.
constexpr int kFutureWrite = 0x10;  // F_SEAL_FUTURE_WRITE, Linux 5.1, which older headers do not have
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | kFutureWrite | F_SEAL_SEAL;

// The position of a piece that comes at `position` at the earliest: positions only grow, and a piece never wraps.
uint64_t place(uint64_t position, size_t length) {
  const uint64_t offset = position % kRingBytes;
  return offset + length > kRingBytes ? position - offset + kRingBytes : position;
}

uint64_t after(uint64_t position, size_t length) {
  return position + (length + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

struct Rings::Segment {
  alignas(kAlignment) std::atomic<uint64_t> consumed;      // of the other's ring, as a position
  alignas(kAlignment) std::atomic<uint64_t> times_waited;  // how often its owner has waited for room
  alignas(kAlignment) std::atomic<uint32_t> closed;
  Stream::Side stream;
  alignas(4096) uint8_t bytes[kRingBytes];
};

Rings::Rings() : fd_(::memfd_create("paceline", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
  if (!fd_) fail("memfd_create");
  if (::ftruncate(fd_.get(), sizeof(Segment)) != 0) fail("ftruncate");
  void* memory = ::mmap(nullptr, sizeof(Segment), PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  if (memory == MAP_FAILED) fail("mmap");
  if (::fcntl(fd_.get(), F_ADD_SEALS, kSeals) != 0) {
    const int error = errno;
    ::munmap(memory, sizeof(Segment));
    fail("fcntl", error);
  }
  ours_ = new (memory) Segment;
}

Rings::~Rings() {
  if (ours_ != nullptr) {
    close();
    ::munmap(ours_, sizeof(Segment));
  }
  if (theirs_ != nullptr) ::munmap(const_cast<Segment*>(theirs_), sizeof(Segment));
}

bool Rings::open(const Fd& theirs) {
  struct stat status{};
  if (is_open() || ::fstat(theirs.get(), &status) != 0 || status.st_size != sizeof(Segment)) return false;
  const int seals = ::fcntl(theirs.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) return false;
  const void* memory = ::mmap(nullptr, sizeof(Segment), PROT_READ, MAP_SHARED, theirs.get(), 0);
  if (memory == MAP_FAILED) return false;
  theirs_ = static_cast<const Segment*>(memory);
  return true;
}

bool Rings::has_room(uint64_t end) {
  if (end - known_consumed_ <= kRingBytes) return true;
  if (theirs_ == nullptr) return false;
  const uint64_t consumed = theirs_->consumed.load();
  if (consumed < known_consumed_ || consumed > produced_) {
    lied_to_ = true;
    return false;
  }
  known_consumed_ = consumed;
  return end - known_consumed_ <= kRingBytes;
}

bool Rings::made_room() const { return theirs_->consumed.load() != known_consumed_; }

bool Rings::put(const uint8_t* bytes, size_t length) {
  const uint64_t at = place(produced_, length);
  const uint64_t end = after(at, length);
  if (!has_room(end)) {
    if (lied_to_) return false;
    wait_for_room();
    if (!has_room(end)) return false;  // the other may have consumed between the two, and not have seen us waiting
  }
  std::memcpy(ours_->bytes + at % kRingBytes, bytes, length);
  produced_ = end;
  return true;
}

void Rings::wait_for_room() { ours_->times_waited.store(++times_waited_); }

const uint8_t* Rings::take(size_t length) {
  const uint64_t at = place(taken_, length);
  taken_ = after(at, length);
  return theirs_->bytes + at % kRingBytes;
}

void Rings::release() { ours_->consumed.store(taken_); }

bool Rings::peer_waits() {
  const uint64_t waited = theirs_->times_waited.load();
  if (waited == times_told_) return false;
  times_told_ = waited;
  return true;
}

Stream Rings::stream() const { return {ours_->stream, theirs_->stream}; }

void Rings::close() { ours_->closed.store(1); }

bool Rings::peer_closed() const { return theirs_->closed.load() != 0; }

}  // namespace paceline
