// A transport makes byte streams between ranks. Each is a folder with one `create`; the engine talks to this
// interface only. Streams are non-blocking sockets, so that one epoll watches all of them; what differs is how peers
// find each other, and whether payload can go through shared memory instead.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "common/fd.h"
#include "transport/rings.h"

namespace paceline {

// What waits in a stream at most, however fast it is.
constexpr size_t kMostUnsentBytes = 1 << 20;

class Transport {
 public:
  virtual ~Transport() = default;

  // Where peers find this process, to be published in the rendezvous store.
  virtual const std::string& address() const = 0;

  // Whether a peer that published this address can be reached this way.
  virtual bool reaches(const std::string& address) const = 0;

  virtual int listening_fd() const = 0;

  // A new stream, or an empty Fd when none is waiting.
  virtual Fd accept() = 0;

  // Starts to connect; the stream becomes writable when that is done. Throws std::system_error when it cannot even
  // start, with ECONNREFUSED when nobody listens there, and EAGAIN when the caller is to try again.
  virtual Fd connect(const std::string& address) = 0;

  // Lets the kernel hold no more of a stream than it sends in a moment, so that what is urgent need not wait behind
  // what is not. Returns how many bytes that is; called again, since rates change.
  virtual size_t limit_unsent(int fd) const = 0;

  // For how long the host at the other end has owed an answer to what was sent; 0 when it owes none. Its kernel
  // answers, so a process that is late, stopped or swapped out owes nothing.
  virtual std::chrono::milliseconds owes_answer_for(int fd) const = 0;

  // For the payload of a new stream; nullptr where it goes through the socket. Throws when there are too many files.
  virtual std::unique_ptr<Rings> create_rings() const = 0;
};

}  // namespace paceline
