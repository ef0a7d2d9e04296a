#include "transport/tcp/tcp.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <linux/tcp.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <vector>

#include "common/log.h"
#include "common/system_error.h"

namespace paceline::tcp {
namespace {

// What the kernel may hold unsent: what goes out in four milliseconds. With less, links fall idle between two turns of
// a busy processor.
constexpr uint64_t kMomentsPerSecond = 250;
constexpr uint64_t kLeastUnsentBytes = 64 << 10;

// A stream with nothing to send asks the other host so often before it is given up.
constexpr int kQuestions = 3;

// The kernel asks a peer that reads nothing whether it does again, ever more rarely. So many of these questions without
// an answer are no accident.
constexpr uint8_t kLostQuestions = 3;

struct Endpoint {
  sockaddr_storage storage{};
  socklen_t length = 0;
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

Endpoint copy(const sockaddr* address) {
  Endpoint endpoint;
  endpoint.length = address->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  std::memcpy(&endpoint.storage, address, endpoint.length);
  return endpoint;
}

// An interface's address, IPv4 first: it is what the rest of a training job uses on a host that has both.
Endpoint of_interface(const std::string& interface) {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) fail("getifaddrs");
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> guard(list, &::freeifaddrs);
  std::string known;
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
      if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != family) continue;
      if (interface == entry->ifa_name) return copy(entry->ifa_addr);
      if (family == AF_INET) known += std::string(known.empty() ? "" : ", ") + entry->ifa_name;
    }
  }
  throw std::runtime_error("no interface " + interface +
                           " with an address is here (PACELINE_IFNAME); there are: " + known);
}

bool can_bind(const Endpoint& endpoint) {
  const Fd fd(::socket(endpoint.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  return fd && ::bind(fd.get(), endpoint.get(), endpoint.length) == 0;
}

bool is_loopback(const Endpoint& endpoint) {
  if (endpoint.storage.ss_family == AF_INET) {
    const auto* address = reinterpret_cast<const sockaddr_in*>(endpoint.get());
    return ntohl(address->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
  }
  return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(endpoint.get())->sin6_addr);
}

std::vector<Endpoint> resolve(const std::string& name, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* list = nullptr;
  std::vector<Endpoint> endpoints;
  if (::getaddrinfo(name.c_str(), nullptr, &hints, &list) != 0) return endpoints;
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> guard(list, &::freeaddrinfo);
  for (const addrinfo* entry = list; entry != nullptr; entry = entry->ai_next) {
    if (entry->ai_family == AF_INET || entry->ai_family == AF_INET6) endpoints.push_back(copy(entry->ai_addr));
  }
  return endpoints;
}

// This host's address on the way to another one, by the routes alone: nothing is sent.
std::optional<Endpoint> on_the_way_to(Endpoint there) {
  const Fd fd(::socket(there.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  const in_port_t port = htons(9);  // any: it is not used
  if (there.storage.ss_family == AF_INET) reinterpret_cast<sockaddr_in*>(there.get())->sin_port = port;
  if (there.storage.ss_family == AF_INET6) reinterpret_cast<sockaddr_in6*>(there.get())->sin6_port = port;
  if (!fd || ::connect(fd.get(), there.get(), there.length) != 0) return std::nullopt;
  Endpoint here;
  here.length = sizeof(here.storage);
  if (::getsockname(fd.get(), here.get(), &here.length) != 0) return std::nullopt;
  here = copy(here.get());
  if (here.storage.ss_family == AF_INET) reinterpret_cast<sockaddr_in*>(here.get())->sin_port = 0;
  if (here.storage.ss_family == AF_INET6) reinterpret_cast<sockaddr_in6*>(here.get())->sin6_port = 0;
  if (is_loopback(here) || !can_bind(here)) return std::nullopt;
  return here;
}

// The first interface that is up and has an address of more than its own link.
std::optional<Endpoint> of_any_interface() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return std::nullopt;
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> guard(list, &::freeifaddrs);
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
      if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != family) continue;
      if ((entry->ifa_flags & IFF_UP) == 0 || (entry->ifa_flags & IFF_LOOPBACK) != 0) continue;
      const Endpoint endpoint = copy(entry->ifa_addr);
      const bool of_its_link = family == AF_INET6 &&
                               IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(endpoint.get())->sin6_addr);
      if (!is_loopback(endpoint) && !of_its_link && can_bind(endpoint)) return endpoint;
    }
  }
  return std::nullopt;
}

// What the host's name resolves to, if it is an address of this host, as Gloo does. Many systems let the name mean
// loopback (127.0.1.1), which no other host can reach: then the address on the way to the job's master, that of the
// default route, or that of any network. A job whose master is on loopback stays there, and so does a host without
// a network.
Endpoint of_host(const std::string& master) {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) fail("gethostname");
  for (const Endpoint& endpoint : resolve(name.data(), 0)) {
    if (!is_loopback(endpoint) && can_bind(endpoint)) return endpoint;
  }
  const std::vector<Endpoint> loopback = resolve("127.0.0.1", AI_NUMERICHOST);
  if (loopback.empty()) throw std::runtime_error("127.0.0.1 is no address here");
  const std::vector<Endpoint> literally = resolve(master, AI_NUMERICHOST);
  const bool stays = master == "localhost" || (!literally.empty() && is_loopback(literally.front()));
  if (stays) return loopback.front();
  std::vector<Endpoint> ways = master.empty() ? std::vector<Endpoint>() : resolve(master, 0);
  for (const char* elsewhere : {"192.0.2.1", "2001:db8::1"}) {  // of nobody, kept for documentation
    for (const Endpoint& endpoint : resolve(elsewhere, AI_NUMERICHOST)) ways.push_back(endpoint);
  }
  for (const Endpoint& there : ways) {
    if (const std::optional<Endpoint> here = on_the_way_to(there)) return *here;
  }
  return of_any_interface().value_or(loopback.front());
}

// "198.18.0.3:4711", "[fd00::3]:4711", "[fe80::3%eth0]:4711": numeric, so that no resolver is asked.
std::string text(const Endpoint& endpoint) {
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  if (::getnameinfo(endpoint.get(), endpoint.length, host.data(), host.size(), port.data(), port.size(),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    throw std::runtime_error("the listening address has no numeric form");
  }
  const bool v6 = endpoint.storage.ss_family == AF_INET6;
  return (v6 ? "[" + std::string(host.data()) + "]" : std::string(host.data())) + ":" + port.data();
}

Endpoint parse(const std::string& address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) throw std::runtime_error("not an address: " + address);
  std::string host = address.substr(0, colon);
  if (host.size() > 1 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  if (::getaddrinfo(host.c_str(), address.substr(colon + 1).c_str(), &hints, &list) != 0) {
    throw std::runtime_error("not an address: " + address);
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> guard(list, &::freeaddrinfo);
  return copy(list->ai_addr);
}

void set(int fd, int level, int name, int value) { ::setsockopt(fd, level, name, &value, sizeof(value)); }

// TCP_USER_TIMEOUT would not do: it also ends a stream whose reader is only late, though its host answers.
void prepare(int fd, std::chrono::seconds host_timeout) {
  set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  if (host_timeout.count() <= 0) return;
  const int timeout_s = static_cast<int>(std::min<int64_t>(host_timeout.count(), 3600));
  const int every_s = std::max(1, timeout_s / (kQuestions + 2));
  set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(fd, IPPROTO_TCP, TCP_KEEPIDLE, std::max(1, timeout_s - kQuestions * every_s));
  set(fd, IPPROTO_TCP, TCP_KEEPINTVL, every_s);
  set(fd, IPPROTO_TCP, TCP_KEEPCNT, kQuestions);
}

void set_congestion(int fd, const std::string& name) {
  if (name.empty()) return;
  const auto length = static_cast<socklen_t>(name.size());
  if (::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), length) == 0) return;
  if (errno != ENOENT && errno != EPERM) fail("setsockopt");
  std::string allowed;
  std::getline(std::ifstream("/proc/sys/net/ipv4/tcp_allowed_congestion_control"), allowed);
  throw std::runtime_error("this process may not use the congestion control \"" + name +
                           "\" (PACELINE_CONGESTION); the kernel allows everybody: " + allowed);
}

class Tcp final : public Transport {
 public:
  explicit Tcp(const Options& options) : host_timeout_(options.host_timeout), congestion_(options.congestion) {
    Endpoint endpoint = options.interface.empty() ? of_host(options.master) : of_interface(options.interface);
    listener_ = Fd(::socket(endpoint.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!listener_) fail("socket");
    set_congestion(listener_.get(), congestion_);  // what it accepts has the same
    if (::bind(listener_.get(), endpoint.get(), endpoint.length) != 0) fail("bind");
    if (::listen(listener_.get(), SOMAXCONN) != 0) fail("listen");
    endpoint.length = sizeof(endpoint.storage);
    if (::getsockname(listener_.get(), endpoint.get(), &endpoint.length) != 0) fail("getsockname");
    address_ = text(endpoint);
    log(LogLevel::kInfo, "listens at " + address_);
  }

  const std::string& address() const override { return address_; }
  bool reaches(const std::string& address) const override { return !address.empty(); }
  int listening_fd() const override { return listener_.get(); }

  Fd accept() override {
    Fd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd) prepare(fd.get(), host_timeout_);
    return fd;
  }

  Fd connect(const std::string& address) override {
    const Endpoint endpoint = parse(address);
    Fd fd(::socket(endpoint.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!fd) fail("socket");
    prepare(fd.get(), host_timeout_);
    set_congestion(fd.get(), congestion_);
    if (::connect(fd.get(), endpoint.get(), endpoint.length) != 0 && errno != EINPROGRESS) fail("connect");
    return fd;
  }

  size_t limit_unsent(int fd) const override {
    tcp_info info{};
    socklen_t length = sizeof(info);
    if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return kMostUnsentBytes;
    const uint64_t in_a_moment = info.tcpi_delivery_rate / kMomentsPerSecond;
    const auto bytes = static_cast<int>(std::clamp<uint64_t>(in_a_moment, kLeastUnsentBytes, kMostUnsentBytes));
    ::setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &bytes, sizeof(bytes));
    return static_cast<size_t>(bytes);
  }

  std::chrono::milliseconds owes_answer_for(int fd) const override {
    tcp_info info{};
    socklen_t length = sizeof(info);
    if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return {};
    const bool owes = info.tcpi_unacked > 0 || info.tcpi_probes >= kLostQuestions;
    return std::chrono::milliseconds(owes ? std::max(info.tcpi_last_ack_recv, 1u) : 0);
  }

  std::unique_ptr<Rings> create_rings() const override { return nullptr; }

 private:
  std::chrono::seconds host_timeout_;
  std::string congestion_;
  Fd listener_;
  std::string address_;
};

}  // namespace

std::unique_ptr<Transport> create(const Options& options) { return std::make_unique<Tcp>(options); }

}  // namespace paceline::tcp
