#include "transport/multicast/multicast.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "transport/multicast/events.h"
#include "transport/multicast/receiver.h"
#include "transport/multicast/sender.h"
#include "transport/multicast/sockets.h"

namespace paceline {
namespace {

constexpr uint32_t kEthernetMtu = 1500;
constexpr uint32_t kEthernetHeaderBytes = 14;
constexpr uint32_t kAlignment = 8;  // of chunks, so that elements of all types stay whole

// In the largest packet that goes through this MTU.
uint32_t payload_bytes(const MulticastRoute& route, uint32_t mtu) {
  const uint32_t taken = route.header_bytes() + kPacketOverheadBytes;
  return mtu > taken ? std::min<uint32_t>(mtu - taken, kMaxChunkBytes) / kAlignment * kAlignment : 0;
}

// As large in IPv4 as in IPv6 would waste a little; all ranks of a group use the same, anyway.
uint32_t choose_chunk(const MulticastSettings& settings, const MulticastRoute& route) {
  const uint32_t chunk = settings.chunk_bytes > 0 ? settings.chunk_bytes : payload_bytes(route, kEthernetMtu);
  const uint32_t most = payload_bytes(route, route.mtu);
  if (chunk > most) {
    throw std::runtime_error("multicast: packets of " + std::to_string(chunk) +
                             " bytes and their headers do not fit into the MTU of " + std::to_string(route.mtu) +
                             " of this interface: ranks must agree on chunks of at most " + std::to_string(most) +
                             " bytes");
  }
  return chunk;
}

}  // namespace

struct Multicast::Parts {
  MulticastEvents events;
  uint32_t chunk_bytes = 0;
  size_t receive_buffer_bytes = 0;
  bool receives_merged = false;
  bool in_child = false;
  std::unique_ptr<MulticastReceiver> receiver;
  std::unique_ptr<MulticastSender> sender;
};

std::unique_ptr<Multicast> Multicast::create(const MulticastSettings& settings) {
  if (settings.rank >= settings.num_ranks) throw std::invalid_argument("multicast: a rank that is none of the group");
  const MulticastRoute route = find_route(settings.group, settings.port, settings.interface_address);
  auto parts = std::make_unique<Parts>();
  parts->chunk_bytes = choose_chunk(settings, route);
  parts->receives_merged = settings.merge_packets;
  Fd receiving = open_receiving(route, settings.receive_buffer_bytes, &parts->receives_merged);
  parts->receive_buffer_bytes = receive_buffer(receiving.get());
  parts->receiver = std::make_unique<MulticastReceiver>(settings, parts->chunk_bytes, std::move(receiving),
                                                        parts->receives_merged, parts->events);
  parts->sender =
      std::make_unique<MulticastSender>(settings, parts->chunk_bytes, open_sending(route, settings.others_on_host),
                                        kEthernetHeaderBytes + route.header_bytes(), parts->events);
  return std::unique_ptr<Multicast>(new Multicast(std::move(parts)));
}

uint32_t Multicast::largest_chunk(const std::string& group, const std::string& interface_address) {
  const MulticastRoute route = find_route(group, 0, interface_address);
  return payload_bytes(route, std::min(route.mtu, kEthernetMtu));
}

Multicast::Multicast(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}

Multicast::~Multicast() {
  // A forked child has the memory, but not the threads: they cannot be joined, and may have held locks.
  if (parts_->in_child) [[maybe_unused]]
    const Parts* left = parts_.release();
}

void Multicast::abandon_in_child() noexcept {
  parts_->in_child = true;
  parts_->receiver->close_files();
  parts_->sender->close_files();
  parts_->events.close();
}

void Multicast::arm(uint64_t transfer, uint32_t source, uint8_t* to, uint64_t bytes,
                    std::chrono::milliseconds quiet_after) {
  parts_->receiver->arm(transfer, source, to, bytes, quiet_after);
}
void Multicast::disarm(uint64_t transfer) noexcept { parts_->receiver->disarm(transfer); }
bool Multicast::place(uint64_t transfer, uint64_t offset, const uint8_t* bytes, uint64_t length) {
  return parts_->receiver->place(transfer, offset, {bytes, length});
}
std::vector<Range> Multicast::missing(uint64_t transfer, size_t most) const {
  return parts_->receiver->missing(transfer, most);
}

void Multicast::send(uint64_t transfer, const uint8_t* from, uint64_t bytes) {
  parts_->sender->send(transfer, from, bytes);
}
void Multicast::send_again(uint64_t transfer, const uint8_t* from, uint64_t bytes, std::span<const Range> ranges) {
  parts_->sender->send_again(transfer, from, bytes, ranges);
}
void Multicast::cancel(uint64_t transfer) noexcept { parts_->sender->cancel(transfer); }
void Multicast::set_rate(uint64_t bytes_per_s) { parts_->sender->set_rate(bytes_per_s); }

int Multicast::event_fd() const { return parts_->events.fd(); }
std::vector<Multicast::Event> Multicast::take_events() { return parts_->events.take(); }
std::string Multicast::failure() const { return parts_->events.failure(); }

Multicast::Counters Multicast::counters() const {
  Counters counters;
  parts_->receiver->count(&counters);
  parts_->sender->count(&counters);
  return counters;
}
uint32_t Multicast::chunk_bytes() const { return parts_->chunk_bytes; }
size_t Multicast::receive_buffer_bytes() const { return parts_->receive_buffer_bytes; }
bool Multicast::sends_merged() const { return parts_->sender->merges(); }
bool Multicast::receives_merged() const { return parts_->receives_merged; }

}  // namespace paceline
