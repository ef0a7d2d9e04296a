#include "engine/packets.h"

#include <algorithm>

#include "engine/group.h"

namespace paceline {
namespace {

// Packets of a transfer come within microseconds of each other, except where a host computes something else.
constexpr auto kQuietAfter = std::chrono::milliseconds(20);

}  // namespace

void MulticastMover::arm(uint64_t transfer, uint32_t source, uint8_t* to, uint64_t bytes) {
  multicast_->arm(transfer, source, to, bytes, kQuietAfter);
}

void MulticastMover::send(uint64_t transfer, const uint8_t* from, uint64_t bytes, uint32_t width) {
  multicast_->set_rate(std::min(rates_.up, rates_.down / width));
  multicast_->send(transfer, from, bytes);
}

void PacketWatcher::on_event(uint32_t) {
  for (const Multicast::Event& event : multicast_.take_events()) {
    if (event.kind == Multicast::Event::Kind::kFailed) {
      group_.fail(group_.rank(), group_.who(group_.rank()) + " cannot multicast any more: " + multicast_.failure());
    }
    group_.collectives().on_packets(event);
  }
  group_.flush_marked();
}

void PacketWatcher::on_exception(const char* what) noexcept { group_.on_exception(what); }

}  // namespace paceline
