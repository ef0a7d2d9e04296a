// Ranks of a multicast group in one process, and memory for what they get.
#pragma once

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "transport/multicast/multicast.h"

namespace paceline::testing {

using std::chrono::milliseconds;
using Kind = Multicast::Event::Kind;

constexpr milliseconds kNever{0};
constexpr milliseconds kQuietAfter{20};
constexpr milliseconds kPatience{60'000};
constexpr const char* kIpv4Group = "239.255.93.7";

inline std::vector<uint8_t> some_bytes(size_t size) {
  std::mt19937 random(static_cast<unsigned>(size));
  std::vector<uint8_t> bytes(size);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

// Tests of other processes have other ports.
inline uint16_t some_port() { return static_cast<uint16_t>(20000 + ::getpid() % 10000); }

inline MulticastSettings some_settings(uint32_t rank, uint32_t num_ranks) {
  static const Nonce unique = random_nonce();
  MulticastSettings settings;
  settings.group = kIpv4Group;
  settings.port = some_port();
  settings.interface_address = "127.0.0.1";
  settings.rank = rank;
  settings.num_ranks = num_ranks;
  settings.group_id = unique;
  settings.secret.fill(7);
  settings.others_on_host = true;
  settings.receive_buffer_bytes = 4 << 20;
  return settings;
}

// One rank, and the events of it that were not asked for yet.
class Rank {
 public:
  explicit Rank(const MulticastSettings& settings) : multicast_(Multicast::create(settings)) {}
  Multicast& operator*() { return *multicast_; }
  Multicast* operator->() { return multicast_.get(); }
  void end() { multicast_.reset(); }

  // The next event of this transfer of one of two kinds; others are kept.
  Kind await(uint64_t transfer, Kind kind, Kind other) {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    for (;;) {
      for (auto event = events_.begin(); event != events_.end(); ++event) {
        if (event->transfer != transfer || (event->kind != kind && event->kind != other)) continue;
        const Kind found = event->kind;
        events_.erase(event);
        return found;
      }
      pollfd file{multicast_->event_fd(), POLLIN, 0};
      const auto left = std::chrono::duration_cast<milliseconds>(until - std::chrono::steady_clock::now());
      if (left.count() <= 0 || ::poll(&file, 1, static_cast<int>(left.count())) < 0) break;
      for (const Multicast::Event& event : multicast_->take_events()) events_.push_back(event);
    }
    throw std::runtime_error("waited in vain; " + multicast_->failure());
  }
  void await(uint64_t transfer, Kind kind) { await(transfer, kind, kind); }
  bool has(uint64_t transfer, Kind kind) {
    for (const Multicast::Event& event : multicast_->take_events()) events_.push_back(event);
    return std::find(events_.begin(), events_.end(), Multicast::Event{kind, transfer}) != events_.end();
  }
  // When it has handled at least so many packets.
  Multicast::Counters await_packets(uint64_t packets) {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    while (std::chrono::steady_clock::now() < until) {
      const Multicast::Counters counters = multicast_->counters();
      if (counters.packets_received >= packets) return counters;
      std::this_thread::sleep_for(milliseconds(1));
    }
    throw std::runtime_error("packets have not come");
  }

 private:
  std::unique_ptr<Multicast> multicast_;
  std::deque<Multicast::Event> events_;
};

// Memory for a transfer, with margins that nobody may touch.
class Destination {
 public:
  explicit Destination(size_t size) : size_(size), bytes_(size + 2 * kMargin, kUntouched) {}
  uint8_t* data() { return bytes_.data() + kMargin; }
  bool holds(const std::vector<uint8_t>& what) const {
    return what.size() == size_ && std::equal(what.begin(), what.end(), bytes_.begin() + kMargin) && margins_intact();
  }
  bool untouched() const { return std::all_of(bytes_.begin(), bytes_.end(), is_untouched); }

 private:
  static constexpr size_t kMargin = 4096;
  static constexpr uint8_t kUntouched = 0xa5;
  static bool is_untouched(uint8_t byte) { return byte == kUntouched; }
  bool margins_intact() const {
    return std::all_of(bytes_.begin(), bytes_.begin() + kMargin, is_untouched) &&
           std::all_of(bytes_.end() - kMargin, bytes_.end(), is_untouched);
  }

  size_t size_;
  std::vector<uint8_t> bytes_;
};

// As an engine does it: gaps are sent again until there are none.
inline void repair(Rank& sender, Rank& receiver, uint64_t transfer, const std::vector<uint8_t>& from) {
  while (receiver.await(transfer, Kind::kComplete, Kind::kQuiet) == Kind::kQuiet) {
    const std::vector<Range> gaps = receiver->missing(transfer, SIZE_MAX);
    sender->send_again(transfer, from.data(), from.size(), gaps);
  }
}

}  // namespace paceline::testing
