// A transport makes byte streams between ranks. Each is a folder with one `create`; the engine talks to this
// interface only. Streams are non-blocking sockets, so that one epoll watches all of them; what differs is how peers
// find each other, and whether payload can be pulled from the peer's memory instead of being sent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "common/fd.h"

namespace paceline {

class Transport {
 public:
  virtual ~Transport() = default;

  // "tcp" or "shm".
  virtual const char* name() const = 0;

  // Where peers find this process, to be published in the rendezvous store.
  virtual const std::string& address() const = 0;

  // Whether a peer that published this address can be reached this way.
  virtual bool reaches(const std::string& address) const = 0;

  virtual int listening_fd() const = 0;

  // A new stream, or an empty Fd when none is waiting.
  virtual Fd accept() = 0;

  // Starts to connect; the stream becomes writable when that is done. Throws std::system_error when it cannot even
  // start, with ECONNREFUSED when nobody listens there.
  virtual Fd connect(const std::string& address) = 0;

  // The process behind an established stream whose memory can be read with `pull`, or 0.
  virtual int pullable_process(int fd) const = 0;

  // Copies `length` bytes from `address` in the memory of `process`. Throws std::system_error.
  virtual void pull(int process, uint64_t address, void* to, size_t length) const = 0;
};

}  // namespace paceline
