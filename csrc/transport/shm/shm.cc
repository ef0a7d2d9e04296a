#include "transport/shm/shm.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <system_error>

#include "common/log.h"
#include "common/system_error.h"
#include "transport/handshake.h"

namespace paceline::shm {
namespace {

std::string namespace_id(const char* path) {
  struct stat status{};
  return ::stat(path, &status) == 0 ? std::to_string(status.st_ino) : "?";
}

// Two processes are on one host when they share a boot of a kernel and the network namespace: abstract sockets live
// there, and hosts of the lab must not see each other.
std::string host_id() {
  std::string boot = "?";
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return boot + "/" + namespace_id("/proc/self/ns/net");
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

  size_t limit_unsent(int /*fd*/) const override { return kMostUnsentBytes; }

  std::chrono::milliseconds owes_answer_for(int /*fd*/) const override { return {}; }

  std::unique_ptr<Rings> create_rings() const override {
    try {
      return std::make_unique<Rings>();
    } catch (const std::system_error& error) {
      if (out_of_files(error.code().value())) throw;
      log(LogLevel::kWarning, std::string("no memory can be shared with ranks of this host (") + error.what() +
                                  "): payload goes through sockets, which is slower");
      return nullptr;
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
    if (out_of_files(error.code().value())) throw;
    log(LogLevel::kWarning, std::string("ranks of this host talk over TCP: ") + error.what());
    return nullptr;
  }
}

}  // namespace paceline::shm
