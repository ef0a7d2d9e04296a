#include "transport/multicast/sockets.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "common/system_error.h"

namespace paceline {
namespace {

#ifndef IPV6_MULTICAST_ALL
#define IPV6_MULTICAST_ALL 29  // Linux 4.20; not in older headers
#endif

// Packets cross no router.
constexpr int kHops = 1;

template <typename Value>
void set(int socket, int level, int option, const Value& value, const char* what) {
  if (::setsockopt(socket, level, option, &value, sizeof(value)) != 0) fail(std::string("multicast: ") + what);
}

template <typename Address>
Address read_as(const sockaddr* address) {
  Address read;
  std::memcpy(&read, address, sizeof(read));
  return read;
}

template <typename Address>
void store(const Address& address, sockaddr_storage* storage) {
  std::memcpy(storage, &address, sizeof(address));
}

[[noreturn]] void refuse(const std::string& why) { throw std::runtime_error("multicast: " + why); }

bool parse(const std::string& text, in_addr* address) { return ::inet_pton(AF_INET, text.c_str(), address) == 1; }
bool parse(const std::string& text, in6_addr* address) { return ::inet_pton(AF_INET6, text.c_str(), address) == 1; }

bool is(const sockaddr* address, const std::string& text) {
  in_addr four{};
  in6_addr six{};
  if (address == nullptr) return false;
  if (address->sa_family == AF_INET && parse(text, &four)) {
    return read_as<sockaddr_in>(address).sin_addr.s_addr == four.s_addr;
  }
  if (address->sa_family == AF_INET6 && parse(text, &six)) {
    const auto address6 = read_as<sockaddr_in6>(address);
    return std::memcmp(&address6.sin6_addr, &six, sizeof(six)) == 0;
  }
  return false;
}

uint32_t mtu_of(const std::string& name) {
  const Fd any(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  ifreq request{};
  name.copy(request.ifr_name, sizeof(request.ifr_name) - 1);
  if (!any || ::ioctl(any.get(), SIOCGIFMTU, &request) != 0) fail("multicast: MTU of " + name);
  return static_cast<uint32_t>(request.ifr_mtu);
}

Fd open_socket(const MulticastRoute& route) {
  Fd opened(::socket(route.group.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!opened) fail("multicast: socket");
  return opened;
}

void join(int socket, const MulticastRoute& route) {
  const auto* const group = reinterpret_cast<const sockaddr*>(&route.group);
  if (route.ipv6()) {
    const ipv6_mreq membership{read_as<sockaddr_in6>(group).sin6_addr, route.interface};
    set(socket, IPPROTO_IPV6, IPV6_JOIN_GROUP, membership, "cannot join the group");
    // Not what other programs of this host joined. Where it is not known (before Linux 4.20), the bound address does
    // it.
    const int no = 0;
    ::setsockopt(socket, IPPROTO_IPV6, IPV6_MULTICAST_ALL, &no, sizeof(no));
  } else {
    ip_mreqn membership{};
    membership.imr_multiaddr = read_as<sockaddr_in>(group).sin_addr;
    membership.imr_ifindex = static_cast<int>(route.interface);
    set(socket, IPPROTO_IP, IP_ADD_MEMBERSHIP, membership, "cannot join the group");
    set(socket, IPPROTO_IP, IP_MULTICAST_ALL, 0, "IP_MULTICAST_ALL");
  }
}

}  // namespace

MulticastRoute find_route(const std::string& group, uint16_t port, const std::string& interface_address) {
  MulticastRoute route;
  in_addr four{};
  in6_addr six{};
  if (parse(group, &four) && IN_MULTICAST(ntohl(four.s_addr))) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr = four;
    store(address, &route.group);
    route.group_length = sizeof(address);
  } else if (parse(group, &six) && IN6_IS_ADDR_MULTICAST(&six)) {
    sockaddr_in6 address{};
    address.sin6_family = AF_INET6;
    address.sin6_port = htons(port);
    address.sin6_addr = six;
    store(address, &route.group);
    route.group_length = sizeof(address);
  } else {
    refuse(group + " is not the address of a multicast group");
  }

  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) fail("getifaddrs");
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> guard(list, &::freeifaddrs);
  std::string name;
  unsigned flags = 0;
  for (const ifaddrs* entry = list; entry != nullptr && name.empty(); entry = entry->ifa_next) {
    if (interface_address != entry->ifa_name && !is(entry->ifa_addr, interface_address)) continue;
    name = entry->ifa_name;
    flags = entry->ifa_flags;
  }
  if (name.empty()) refuse("no interface of this host has the name or address " + interface_address);
  route.loopback = (flags & IFF_LOOPBACK) != 0;
  if ((flags & IFF_UP) == 0) refuse("interface " + name + " is down");
  if ((flags & IFF_MULTICAST) == 0 && !route.loopback) refuse("interface " + name + " does not do multicast");
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (name != entry->ifa_name || entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != AF_INET) continue;
    // The address that was asked for, or else the interface's first one.
    if (route.own.ss_family == AF_UNSPEC || is(entry->ifa_addr, interface_address)) {
      store(read_as<sockaddr_in>(entry->ifa_addr), &route.own);
    }
  }
  if (!route.ipv6() && route.own.ss_family != AF_INET) refuse("interface " + name + " has no IPv4 address");
  route.interface = ::if_nametoindex(name.c_str());
  if (route.interface == 0) fail("multicast: interface " + name);
  route.mtu = mtu_of(name);
  if (route.ipv6()) {
    auto address = read_as<sockaddr_in6>(reinterpret_cast<const sockaddr*>(&route.group));
    address.sin6_scope_id = route.interface;
    store(address, &route.group);
  }
  return route;
}

Fd open_receiving(const MulticastRoute& route, size_t buffer_bytes, bool* merged) {
  Fd socket = open_socket(route);
  // Of a multicast packet each socket that shares the port by this option gets a copy; SO_REUSEPORT is not needed for
  // it.
  set(socket.get(), SOL_SOCKET, SO_REUSEADDR, 1, "SO_REUSEADDR");
  if (buffer_bytes > 0) {
    const int wanted = static_cast<int>(std::min<size_t>(buffer_bytes, INT_MAX));
    if (::setsockopt(socket.get(), SOL_SOCKET, SO_RCVBUFFORCE, &wanted, sizeof(wanted)) != 0) {
      set(socket.get(), SOL_SOCKET, SO_RCVBUF, wanted, "SO_RCVBUF");  // without privileges up to net.core.rmem_max
    }
  }
  const int on = 1;
  *merged = *merged && ::setsockopt(socket.get(), IPPROTO_UDP, UDP_GRO, &on, sizeof(on)) == 0;
  // Bound to the group's address, so that nothing else that is sent to the port arrives.
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&route.group), route.group_length) != 0) {
    fail("multicast: cannot bind to the group's address and port");
  }
  join(socket.get(), route);
  return socket;
}

size_t receive_buffer(int socket) {
  int bytes = 0;
  socklen_t length = sizeof(bytes);
  if (::getsockopt(socket, SOL_SOCKET, SO_RCVBUF, &bytes, &length) != 0) fail("multicast: SO_RCVBUF");
  return static_cast<size_t>(bytes);
}

Fd open_sending(const MulticastRoute& route, bool loop) {
  Fd socket = open_socket(route);
  // By the loopback interface packets come back anyway; looped as well, they would come twice.
  const int looped = loop && !route.loopback ? 1 : 0;
  // By RECVERR the kernel says when this host's own queue had no room for packets (ENOBUFS), which it otherwise keeps
  // to itself.
  if (route.ipv6()) {
    set(socket.get(), IPPROTO_IPV6, IPV6_MULTICAST_IF, static_cast<int>(route.interface), "IPV6_MULTICAST_IF");
    set(socket.get(), IPPROTO_IPV6, IPV6_MULTICAST_HOPS, kHops, "IPV6_MULTICAST_HOPS");
    set(socket.get(), IPPROTO_IPV6, IPV6_MULTICAST_LOOP, looped, "IPV6_MULTICAST_LOOP");
    set(socket.get(), IPPROTO_IPV6, IPV6_RECVERR, 1, "IPV6_RECVERR");
  } else {
    ip_mreqn interface{};
    interface.imr_address = read_as<sockaddr_in>(reinterpret_cast<const sockaddr*>(&route.own)).sin_addr;
    interface.imr_ifindex = static_cast<int>(route.interface);
    set(socket.get(), IPPROTO_IP, IP_MULTICAST_IF, interface, "IP_MULTICAST_IF");
    set(socket.get(), IPPROTO_IP, IP_MULTICAST_TTL, kHops, "IP_MULTICAST_TTL");
    set(socket.get(), IPPROTO_IP, IP_MULTICAST_LOOP, looped, "IP_MULTICAST_LOOP");
    set(socket.get(), IPPROTO_IP, IP_RECVERR, 1, "IP_RECVERR");
  }
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&route.group), route.group_length) != 0) {
    fail("multicast: cannot send to the group");
  }
  return socket;
}

}  // namespace paceline
