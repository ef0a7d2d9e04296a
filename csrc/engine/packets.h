// What a group has where packets reach all its ranks: its Multicast, and what the engine does with its events.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/poller.h"
#include "engine/spreads.h"
#include "transport/multicast/multicast.h"

namespace paceline {

class Group;

// The rates of a group's hosts in bytes a second, headers included.
struct PacketRates {
  uint64_t up = 0;    // of this rank's host
  uint64_t down = 0;  // of the host that receives slowest
};

// Moves the packets of spreads by multicast, as fast as this host sends and all others can receive.
class MulticastMover final : public PacketMover {
 public:
  MulticastMover(std::unique_ptr<Multicast> multicast, PacketRates rates)
      : multicast_(std::move(multicast)), rates_(rates) {}

  Multicast& multicast() { return *multicast_; }

  void arm(uint64_t transfer, uint32_t source, uint8_t* to, uint64_t bytes) override;
  void disarm(uint64_t transfer) noexcept override { multicast_->disarm(transfer); }
  bool place(uint64_t transfer, uint64_t offset, const uint8_t* bytes, uint64_t length) override {
    return multicast_->place(transfer, offset, bytes, length);
  }
  std::vector<Range> missing(uint64_t transfer, size_t most) const override {
    return multicast_->missing(transfer, most);
  }
  void send(uint64_t transfer, const uint8_t* from, uint64_t bytes, uint32_t width) override;
  void send_again(uint64_t transfer, const uint8_t* from, uint64_t bytes, std::span<const Range> ranges) override {
    multicast_->send_again(transfer, from, bytes, ranges);
  }
  void cancel(uint64_t transfer) noexcept override { multicast_->cancel(transfer); }

 private:
  std::unique_ptr<Multicast> multicast_;
  PacketRates rates_;
};

// Tells a group what its Multicast has to say.
class PacketWatcher final : public Watcher {
 public:
  PacketWatcher(Group& group, Multicast& multicast) : group_(group), multicast_(multicast) {}
  void on_event(uint32_t events) override;
  void on_exception(const char* what) noexcept override;

 private:
  Group& group_;
  Multicast& multicast_;
};

}  // namespace paceline
