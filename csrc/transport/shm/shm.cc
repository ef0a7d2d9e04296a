#include "transport/shm/shm.h"

#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <system_error>

#include "common/log.h"
#include "transport/handshake.h"

namespace paceline::shm {
namespace {

[[noreturn]] void fail(const std::string& what) { throw std::system_error(errno, std::generic_category(), what); }

std::string namespace_id(const char* path) {
  struct stat status{};
  return ::stat(path, &status) == 0 ? std::to_string(status.st_ino) : "?";
}

// Two processes are on one host when they share a boot of a kernel, the network namespace (abstract sockets live
// there, and hosts of the lab must not see each other) and the process namespace (a pid must mean the same).
std::string host_id() {
  std::string boot = "?";
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return boot + "/" + namespace_id("/proc/self/ns/net") + "/" + namespace_id("/proc/self/ns/pid");
}

// Where only parents may look into a process (Yama, as on Ubuntu), peers must be allowed to.
void allow_peers() {
  int scope = 0;
  std::ifstream("/proc/sys/kernel/yama/ptrace_scope") >> scope;
  if (scope == 1) ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
}

sockaddr_un abstract(const std::string& name, socklen_t* length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const size_t size = std::min(name.size(), sizeof(address.sun_path) - 1);
  std::memcpy(address.sun_path + 1, name.data(), size);  // a leading zero byte: no file to clean up
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + size);
  return address;
}

class Shm final : public Transport {
 public:
  Shm() : host_(host_id()) {
    allow_peers();
    listener_ = Fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!listener_) fail("socket");
    std::string name = "paceline-" + std::to_string(::getpid()) + "-";
    for (const uint8_t byte : random_nonce()) name += "0123456789abcdef"[byte & 15];
    socklen_t length = 0;
    const sockaddr_un address = abstract(name, &length);
    if (::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) fail("bind");
    if (::listen(listener_.get(), SOMAXCONN) != 0) fail("listen");
    address_ = host_ + " " + name;
  }

  const char* name() const override { return "shm"; }
  const std::string& address() const override { return address_; }
  bool reaches(const std::string& address) const override { return address.rfind(host_ + " ", 0) == 0; }
  int listening_fd() const override { return listener_.get(); }

  Fd accept() override { return Fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC)); }

  Fd connect(const std::string& address) override {
    Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!fd) fail("socket");
    socklen_t length = 0;
    const sockaddr_un target = abstract(address.substr(host_.size() + 1), &length);
    if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&target), length) != 0) fail("connect");
    return fd;
  }

  int pullable_process(int fd) const override {
    ucred peer{};
    socklen_t length = sizeof(peer);
    if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0 || peer.pid <= 0) return 0;
    // An address of ours need not exist there: a fault still tells that we were allowed to look.
    char byte = 0;
    const iovec here{&byte, 1}, there{&byte, 1};
    if (::process_vm_readv(peer.pid, &here, 1, &there, 1, 0) == 1 || errno == EFAULT) return peer.pid;
    log(LogLevel::kWarning, "the kernel forbids reading the memory of process " + std::to_string(peer.pid) + " (" +
                                std::strerror(errno) + "): payload goes through sockets, which is slower");
    return 0;
  }

  void pull(int process, uint64_t address, void* to, size_t length) const override {
    auto* at = static_cast<char*>(to);
    while (length > 0) {
      const iovec here{at, length};
      const iovec there{reinterpret_cast<void*>(address), length};  // NOLINT(performance-no-int-to-ptr)
      const ssize_t got = ::process_vm_readv(process, &here, 1, &there, 1, 0);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) fail("process_vm_readv");
      at += got;
      address += static_cast<uint64_t>(got);
      length -= static_cast<size_t>(got);
    }
  }

 private:
  std::string host_;
  Fd listener_;
  std::string address_;
};

}  // namespace

std::unique_ptr<Transport> create() {
  try {
    return std::make_unique<Shm>();
  } catch (const std::system_error& error) {
    log(LogLevel::kWarning, std::string("ranks of this host talk over TCP: ") + error.what());
    return nullptr;
  }
}

}  // namespace paceline::shm
