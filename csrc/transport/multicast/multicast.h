// Moves the bytes of transfers from one rank to all others of a closed group by UDP multicast. Each chunk is sent once,
// in a packet that carries its number, and goes straight to its place; losses are reported as gaps, which are repaired
// by send_again() here or by bytes that came by another way (place()).
//
// Two threads: one receives, one sends. Neither takes a lock of the caller, and no call here waits for the network, so
// callers may hold their own lock: disarm() waits for the copy of one packet at most, cancel() for one burst to be
// handed to the kernel. Calls may come from any thread.
//
//   what a transfer is told          what follows
//   arm()                            its packets are placed; kQuiet each time nothing new has come for `quiet_after`
//   a packet brought the last chunk  kComplete, once
//   place() brought the last chunk   place() returns true; kComplete does not follow
//   disarm()                         nothing is written any more; events of it that were not taken may still be
//   send(), send_again()             kSent when its last packet has been handed to the kernel
//   cancel()                         kSent does not follow, unless it was there before
//
// Packets are lost when they come before arm(): senders must know that receivers are ready. Packets are authenticated
// by a key for each sender (authentication.h); one that is not, or that does not fit what was armed, changes nothing.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "transport/handshake.h"

namespace paceline {

struct MulticastSettings {
  std::string group;  // "239.255.x.y" or "ff15::..."
  uint16_t port = 0;
  std::string interface_address;  // where to join and send: an IPv4 address of the interface, or the interface's name
  uint32_t rank = 0;
  uint32_t num_ranks = 0;
  GroupId group_id{};
  Secret secret{};
  // What this rank sends at most, with all headers down to Ethernet's. 0: as fast as the kernel takes it.
  uint64_t rate_bytes_per_s = 0;
  bool others_on_host = false;      // other ranks of this host are to receive the packets, too
  size_t receive_buffer_bytes = 0;  // wanted of the kernel; 0: its default. receive_buffer_bytes() says what was got
  int receiving_core = -1;          // for the receiving thread alone; -1: any
  // Payload of a packet, the same on all ranks: the least of their largest_chunk(). 0: what fits into an MTU of 1500.
  uint32_t chunk_bytes = 0;
  // Whether packets are sent and received merged (UDP_SEGMENT, UDP_GRO) where the kernel can: off only to compare.
  bool merge_packets = true;
  // For tests: a packet for which it returns false is lost on its way. Called by the receiving thread.
  std::function<bool(std::span<const uint8_t> packet)> receive_filter;
};

struct Range {
  uint64_t offset = 0;
  uint64_t bytes = 0;

  bool operator==(const Range&) const = default;
};

class Multicast {
 public:
  struct Event {
    enum class Kind : uint8_t {
      kComplete,
      kQuiet,
      kSent,
      kFailed,  // a thread has ended with an error: failure() says which. Nothing is received or sent any more
    };
    Kind kind = Kind::kComplete;
    uint64_t transfer = 0;

    bool operator==(const Event&) const = default;
  };

  struct Counters {
    uint64_t packets_sent = 0;
    uint64_t bytes_sent = 0;        // with all headers, as the rate counts them
    uint64_t packets_refused = 0;   // by the kernel for good (interface down, firewall): lost
    uint64_t packets_received = 0;  // all that came to the socket, whatever they are
    uint64_t bytes_received = 0;    // of packets that were placed, without headers
    uint64_t malformed = 0;         // no packet of this group
    uint64_t forged = 0;            // wrong tag
    uint64_t stale = 0;             // of a transfer that is not armed
    uint64_t mismatched = 0;        // of an armed transfer, but with another source, length or chunk
    uint64_t duplicate = 0;         // the chunk was there
    uint64_t overflowed = 0;        // lost because the receive buffer was full; the kernel counts merged packets as one
    uint64_t batches_received = 0;  // system calls that brought something
    uint64_t batches_sent = 0;      // system calls that took something
  };

  // Throws std::runtime_error that says why not: no libcrypto, an interface that does not do multicast, ...
  static std::unique_ptr<Multicast> create(const MulticastSettings& settings);
  // The largest chunk whose packet fits into the MTU of this interface, or into 1500 bytes if that is less.
  static uint32_t largest_chunk(const std::string& group, const std::string& interface_address);
  // Ends both threads. Memory of transfers is not touched any more; what was not sent is not sent.
  ~Multicast();
  Multicast(const Multicast&) = delete;
  Multicast& operator=(const Multicast&) = delete;

  // A transfer is named by a number that is never used twice in a group, for it is what tells its packets from those of
  // others. No memory is needed where it has 0 bytes; then kComplete follows at once.
  // `to` must stay valid until disarm() has returned. `quiet_after` of 0: never.
  void arm(uint64_t transfer, uint32_t source, uint8_t* to, uint64_t bytes, std::chrono::milliseconds quiet_after);
  // After it has returned, nothing is written to the memory any more. No transfer of this number: nothing happens.
  void disarm(uint64_t transfer) noexcept;
  // Bytes that came by another way. Chunks that are there are left alone; of chunks of which these are a part it is
  // remembered, and the chunk is there when all its bytes are. Returns whether the transfer is complete now. Bytes
  // outside of it, or of a transfer that is not armed, are ignored (false).
  bool place(uint64_t transfer, uint64_t offset, const uint8_t* bytes, uint64_t length);
  // The gaps, ascending, in whole chunks, at most so many.
  std::vector<Range> missing(uint64_t transfer, size_t most) const;

  // Paced, one transfer after the other. `from` must stay valid until kSent, or until cancel() has returned.
  void send(uint64_t transfer, const uint8_t* from, uint64_t bytes);
  // The chunks that these ranges touch, again; `bytes` are those of the whole transfer. Goes before what send() has not
  // begun or finished. Has a kSent of its own.
  void send_again(uint64_t transfer, const uint8_t* from, uint64_t bytes, std::span<const Range> ranges);
  // Forgets what is left to send of it. After it has returned, the memory is not read any more.
  void cancel(uint64_t transfer) noexcept;
  void set_rate(uint64_t bytes_per_s);

  // Readable (epoll) when there are events.
  int event_fd() const;
  std::vector<Event> take_events();
  // Why a thread has ended; empty as long as both run.
  std::string failure() const;

  Counters counters() const;
  uint32_t chunk_bytes() const;
  size_t receive_buffer_bytes() const;
  // Whether packets go out merged, which is only known for sure once some have been sent.
  bool sends_merged() const;
  bool receives_merged() const;

  // In a forked child, by its owner: closes the child's copies of sockets. Only the destructor may be called after
  // that.
  void abandon_in_child() noexcept;

 private:
  struct Parts;
  explicit Multicast(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

}  // namespace paceline
