// Files that travel with bytes on a Unix socket.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <span>

#include "common/fd.h"

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

// recvmsg; `*file` is the open file that came with the bytes, or stays as it is. More than one file is closed again;
// `*lost` is set where the kernel had one and this process has no descriptor left for it.
inline ssize_t receive_with_file(int socket, std::span<iovec> parts, Fd* file, bool* lost) {
  alignas(cmsghdr) std::array<uint8_t, CMSG_SPACE(sizeof(int))> space{};
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  message.msg_control = space.data();
  message.msg_controllen = space.size();
  const ssize_t got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  const cmsghdr* control = got >= 0 ? CMSG_FIRSTHDR(&message) : nullptr;
  if (control != nullptr && control->cmsg_level == SOL_SOCKET && control->cmsg_type == SCM_RIGHTS) {
    // The padding of the space for one lets a second one in.
    for (size_t at = CMSG_LEN(0); at + sizeof(int) <= control->cmsg_len; at += sizeof(int)) {
      int passed = -1;
      std::memcpy(&passed, CMSG_DATA(control) + (at - CMSG_LEN(0)), sizeof(passed));
      Fd received(passed);
      if (at == CMSG_LEN(0)) *file = std::move(received);
    }
  }
  if (got >= 0 && (message.msg_flags & MSG_CTRUNC) != 0 && !*file) *lost = true;
  return got;
}

}  // namespace paceline
