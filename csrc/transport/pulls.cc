#include "transport/pulls.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <string>

#include "common/fd.h"
#include "common/log.h"
#include "transport/handshake.h"

namespace paceline {
namespace {

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

}  // namespace

Pulls::Pulls(int socket) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0) process_ = peer.pid;
  const Nonce nonce = random_nonce();
  std::memcpy(&word_, nonce.data(), sizeof(word_));
}

bool Pulls::find(uint64_t address, uint64_t word) const {
  uint64_t found = 0;
  const int error = process_ > 0 ? read(address, &found, sizeof(found)) : ESRCH;
  if (error == 0 && found == word) return true;
  if (error == EPERM || error == ENOSYS) {
    static std::once_flag once;
    std::call_once(once, [&] {
      log(LogLevel::kInfo, std::string("ranks of this host cannot read each other's memory (process_vm_readv: ") +
                               std::strerror(error) + "): large payload is copied twice");
    });
  }
  return false;
}

int Pulls::read(uint64_t address, void* to, size_t bytes) const {
  for (size_t done = 0; done < bytes;) {
    const iovec local{static_cast<uint8_t*>(to) + done, bytes - done};
    const iovec remote{reinterpret_cast<void*>(address + done), bytes - done};  // NOLINT(performance-no-int-to-ptr)
    const ssize_t got = ::process_vm_readv(process_, &local, 1, &remote, 1, 0);
    if (got <= 0) return got == 0 ? EFAULT : errno;
    done += static_cast<size_t>(got);
  }
  return 0;
}

bool in_huge_pages(const void* memory, size_t bytes) {
  constexpr uint64_t kPage = 4096;
  const Fd pages(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));  // of this process, also when it was forked
  std::array<uint64_t, 3> region{};
  ScanRequest request;
  request.start = (reinterpret_cast<uint64_t>(memory) + bytes / 2) / kPage * kPage;
  request.end = request.start + kPage;
  request.regions = reinterpret_cast<uint64_t>(region.data());
  return pages && ::ioctl(pages.get(), kScan, &request) == 1;
}

}  // namespace paceline
