// What a packet of multicast costs, and what one core receives: multicast_packets [interface, default lo]
//
// One transfer is sent to the loopback interface and waits in the receive buffer, which takes root (SO_RCVBUFFORCE);
// then it is received, and only that is timed. So the work of the network card's interrupts is not in these figures: on
// the loopback interface the sender does it. The parts are timed alone: reading packets from the kernel, checking tags,
// copying payload. Medians of several turns.
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "common/cores.h"
#include "transport/multicast/authentication.h"
#include "transport/multicast/multicast.h"
#include "transport/multicast/placement.h"
#include "transport/multicast/sockets.h"

using namespace paceline;

namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kBytes = 64 << 20;
constexpr size_t kBuffer = size_t{1} << 30;
constexpr int kTurns = 9;
constexpr uint16_t kPort = 47210;
constexpr const char* kGroup = "239.255.77.1";

double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

double median(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

uint64_t packets_of(uint32_t chunk_bytes) { return Chunks{kBytes, chunk_bytes}.count(); }

void print(const char* what, double seconds, uint64_t packets) {
  std::printf("%-52s %6.3f us a packet  %6.2f GB/s\n", what, seconds / static_cast<double>(packets) * 1e6,
              static_cast<double>(kBytes) / seconds / 1e9);
}

MulticastSettings settings(const std::string& interface, uint32_t rank, bool merged) {
  MulticastSettings settings;
  settings.group = kGroup;
  settings.port = kPort;
  settings.interface_address = interface;
  settings.rank = rank;
  settings.num_ranks = 2;
  settings.receive_buffer_bytes = kBuffer;
  settings.merge_packets = merged;
  settings.others_on_host = true;
  return settings;
}

void await(Multicast& multicast, Multicast::Event::Kind kind) {
  for (;;) {
    pollfd events{multicast.event_fd(), POLLIN, 0};
    if (::poll(&events, 1, 10000) <= 0) throw std::runtime_error("packets were lost: is this run by root?");
    for (const Multicast::Event& event : multicast.take_events()) {
      if (event.kind == kind) return;
    }
  }
}

// All that is done for packets. `queued`: they were sent before; otherwise another core sends them meanwhile.
void receive_all(const char* what, const std::string& interface, bool merged, bool queued) {
  std::atomic<bool> go{true};
  MulticastSettings receiving = settings(interface, 1, merged);
  receiving.receiving_core = allowed_cores().back();
  receiving.receive_filter = [&](std::span<const uint8_t>) {
    while (!go.load()) std::this_thread::sleep_for(std::chrono::microseconds(100));
    return true;
  };
  const auto receiver = Multicast::create(receiving);
  const auto sender = Multicast::create(settings(interface, 0, merged));
  const std::vector<uint8_t> from(kBytes, 7);
  std::vector<uint8_t> to(kBytes);
  std::vector<double> times;
  for (uint64_t turn = 1; turn <= kTurns; ++turn) {
    go = !queued;
    receiver->arm(turn, 0, to.data(), kBytes, std::chrono::milliseconds(0));
    Clock::time_point begin = Clock::now();
    sender->send(turn, from.data(), kBytes);
    await(*sender, Multicast::Event::Kind::kSent);
    if (queued) begin = Clock::now();
    go = true;
    await(*receiver, Multicast::Event::Kind::kComplete);
    times.push_back(since(begin));
    receiver->disarm(turn);
    std::fill(to.begin(), to.end(), uint8_t{0});
  }
  print(what, median(times), packets_of(receiver->chunk_bytes()));
}

// Only the system calls that read packets.
void read_all(const char* what, const std::string& interface, bool merged) {
  const MulticastRoute route = find_route(kGroup, kPort, interface);
  const Fd socket = open_receiving(route, kBuffer, &merged);
  const auto sender = Multicast::create(settings(interface, 0, merged));
  const uint64_t packets = packets_of(sender->chunk_bytes());
  const size_t pieces = merged ? 8 : 64;
  const size_t piece_bytes = merged ? 64 << 10 : 1536;
  std::vector<uint8_t> bytes(pieces * piece_bytes);
  std::vector<iovec> parts(pieces);
  std::vector<mmsghdr> messages(pieces);
  for (size_t i = 0; i < pieces; ++i) {
    parts[i] = {bytes.data() + i * piece_bytes, piece_bytes};
    messages[i].msg_hdr.msg_iov = &parts[i];
    messages[i].msg_hdr.msg_iovlen = 1;
  }
  const std::vector<uint8_t> from(kBytes, 7);
  std::vector<double> times;
  for (uint64_t turn = 1; turn <= kTurns; ++turn) {
    sender->send(turn, from.data(), kBytes);
    await(*sender, Multicast::Event::Kind::kSent);
    uint64_t left = kBytes + packets * kPacketOverheadBytes;
    const Clock::time_point begin = Clock::now();
    while (left > 0) {
      const int got = ::recvmmsg(socket.get(), messages.data(), static_cast<unsigned>(pieces), MSG_DONTWAIT, nullptr);
      if (got < 0) throw std::runtime_error("packets were lost: is this run by root?");
      for (int i = 0; i < got; ++i) left -= messages[static_cast<size_t>(i)].msg_len;
    }
    times.push_back(since(begin));
  }
  print(what, median(times), packets);
}

// Tags and copies as they are found after a system call: the packets of one batch, again and again.
void check_and_copy(uint32_t chunk_bytes) {
  constexpr size_t kBatch = 8 * 44;
  const Chunks chunks{kBytes, chunk_bytes};
  Authenticator authenticator(packet_key(Secret{}, GroupId{}, 0));
  std::vector<std::vector<uint8_t>> batch;
  PacketHeader header{.transfer = 1, .chunks = chunks};
  const std::vector<uint8_t> payload(chunk_bytes, 7);
  for (header.chunk = 0; header.chunk < kBatch; ++header.chunk) {
    std::vector<uint8_t>& packet = batch.emplace_back(kPacketHeaderBytes);
    ++header.counter;
    encode(header, std::span<uint8_t, kPacketHeaderBytes>(packet.data(), kPacketHeaderBytes));
    const Tag tag = authenticator.tag(packet, payload);
    packet.insert(packet.end(), payload.begin(), payload.end());
    packet.insert(packet.end(), tag.begin(), tag.end());
  }
  std::vector<uint8_t> to(kBytes);
  std::vector<double> tags;
  std::vector<double> copies;
  for (int turn = 0; turn < kTurns; ++turn) {
    Clock::time_point begin = Clock::now();
    for (uint64_t i = 0; i < chunks.count(); ++i) {
      if (!authenticator.genuine(batch[i % kBatch])) throw std::runtime_error("a genuine tag is refused");
    }
    tags.push_back(since(begin));
    Placement placement(to.data(), chunks);
    begin = Clock::now();
    for (uint64_t i = 0; i < chunks.count(); ++i) {
      placement.place_chunk(i, batch[i % kBatch].data() + kPacketHeaderBytes);
    }
    copies.push_back(since(begin));
  }
  print("  check the tag", median(tags), chunks.count());
  print("  copy to its place and set the bit", median(copies), chunks.count());
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::string interface = argc > 1 ? argv[1] : "lo";
    receive_all("received from a full buffer, merged (UDP_GRO)", interface, true, true);
    receive_all("received from a full buffer, packet by packet", interface, false, true);
    receive_all("sent and received at once, merged", interface, true, false);
    receive_all("sent and received at once, packet by packet", interface, false, false);
    std::printf("of this:\n");
    read_all("  read, merged", interface, true);
    read_all("  read, packet by packet", interface, false);
    check_and_copy(Multicast::largest_chunk(kGroup, interface));
  } catch (const std::exception& thrown) {
    std::fprintf(stderr, "%s\n", thrown.what());
    return 1;
  }
  return 0;
}
