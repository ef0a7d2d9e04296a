// The sockets of a multicast group.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>

#include "common/fd.h"

namespace paceline {

// A group and the interface by which it is reached.
struct MulticastRoute {
  sockaddr_storage group{};
  socklen_t group_length = 0;
  sockaddr_storage own{};  // IPv4: the interface's address, from which packets are sent
  unsigned interface = 0;  // its number
  uint32_t mtu = 0;
  bool loopback =
      false;  // this interface is the host's own: packets reach this host by it, whether they are looped or not

  bool ipv6() const { return group.ss_family == AF_INET6; }
  // Of IP and UDP.
  uint32_t header_bytes() const { return (ipv6() ? 40 : 20) + 8; }
};

// Throws std::runtime_error where the group is none, or the interface cannot be used.
MulticastRoute find_route(const std::string& group, uint16_t port, const std::string& interface_address);

// Joined; other sockets of this host may join, too, and each gets all packets. `buffer_bytes` 0: the kernel's default.
// Packets come merged (UDP_GRO) if `*merged` and the kernel can; otherwise `*merged` becomes false.
Fd open_receiving(const MulticastRoute& route, size_t buffer_bytes, bool* merged);
size_t receive_buffer(int socket);

// Connected to the group. `loop`: sockets of this host get the packets, too, those of this process among them.
Fd open_sending(const MulticastRoute& route, bool loop);

}  // namespace paceline
