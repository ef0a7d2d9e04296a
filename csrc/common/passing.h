// Files that travel with bytes on a Unix socket.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <span>

namespace paceline {

// sendmsg of these bytes, with an open file unless `file` is negative.
inline ssize_t send_with_file(int socket, std::span<iovec> parts, int file, int flags) {
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  alignas(cmsghdr) std::array<uint8_t, CMSG_SPACE(sizeof(int))> space{};
  if (file >= 0) {
    message.msg_control = space.data();
    message.msg_controllen = space.size();
    cmsghdr* control = CMSG_FIRSTHDR(&message);
    control->cmsg_level = SOL_SOCKET;
    control->cmsg_type = SCM_RIGHTS;
    control->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(control), &file, sizeof(file));
  }
  return ::sendmsg(socket, &message, flags);
}

// recvmsg; `*file` is the open file that came with the bytes, or stays as it is.
inline ssize_t receive_with_file(int socket, std::span<iovec> parts, int* file) {
  alignas(cmsghdr) std::array<uint8_t, CMSG_SPACE(sizeof(int))> space{};
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  message.msg_control = space.data();
  message.msg_controllen = space.size();
  const ssize_t got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  const cmsghdr* control = got > 0 ? CMSG_FIRSTHDR(&message) : nullptr;
  if (control != nullptr && control->cmsg_level == SOL_SOCKET && control->cmsg_type == SCM_RIGHTS) {
    std::memcpy(file, CMSG_DATA(control), sizeof(*file));
  }
  return got;
}

}  // namespace paceline
