#include "c10d/probing.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <set>
#include <stdexcept>
#include <vector>

namespace paceline {
namespace {

// How long packets may take to get through, and how often each rank sends one meanwhile.
constexpr auto kLongestProbe = std::chrono::milliseconds(1000);
constexpr auto kProbeEvery = std::chrono::milliseconds(5);

// One packet.
constexpr size_t kProbeBytes = 64;

constexpr size_t kReceiveBufferBytes = 16 << 20;

constexpr char kReady = '+', kRefusal = '-';

struct Endpoint {
  std::string host;
  bool ipv6 = false;
};

// Of "198.18.0.3:4711" or "[fd00::3]:4711".
Endpoint host_of(const std::string& tcp) {
  const std::string host = tcp.substr(0, tcp.rfind(':'));
  if (host.empty() || host.front() != '[') return {host, false};
  return {host.substr(1, host.size() - 2), true};
}

// The name of the interface that has this IPv6 address.
std::string interface_of(const std::string& host) {
  in6_addr wanted{};
  if (::inet_pton(AF_INET6, host.substr(0, host.find('%')).c_str(), &wanted) != 1) return "";
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return "";
  std::string name;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != AF_INET6) continue;
    const auto* address = reinterpret_cast<const sockaddr_in6*>(entry->ifa_addr);
    if (std::memcmp(&address->sin6_addr, &wanted, sizeof(wanted)) == 0) name = entry->ifa_name;
  }
  ::freeifaddrs(list);
  return name;
}

// Of the group's own: 239.192.0.0/14 and ff15:: are for use inside an organisation.
std::string address_for(const GroupId& id, bool ipv6) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (ipv6) {
    in6_addr address{};
    address.s6_addr[0] = 0xff;
    address.s6_addr[1] = 0x15;
    std::copy_n(id.begin(), 14, address.s6_addr + 2);
    ::inet_ntop(AF_INET6, &address, text.data(), text.size());
  } else {
    const uint32_t number = uint32_t{id[0]} << 16 | uint32_t{id[1]} << 8 | id[2];
    const in_addr address{htonl(0xefc00000 | (number & 0x3ffff))};
    ::inet_ntop(AF_INET, &address, text.data(), text.size());
  }
  return text.data();
}

// What all ranks say to each other, one after the other: each round has keys of its own.
class Conversation {
 public:
  Conversation(c10d::Store& store, const Group& group) : store_(store), group_(group) {}

  void say(const std::string& round, const std::string& words) {
    store_.set(key(round, group_.rank()), std::vector<uint8_t>(words.begin(), words.end()));
  }
  bool all_have_said(const std::string& round) { return store_.check(keys(round)); }
  // Waits for all. Returns the first refusal, or an empty string.
  std::string refusal(const std::string& round, std::vector<std::string>* said = nullptr) {
    std::string first;
    for (uint32_t rank = 0; rank < group_.size(); ++rank) {
      const std::vector<uint8_t> bytes = store_.get(key(round, rank));
      const std::string words(bytes.begin(), bytes.end());
      if (said != nullptr) said->push_back(words.substr(std::min<size_t>(1, words.size())));
      const bool refuses = words.empty() || words.front() == kRefusal;
      if (refuses && first.empty()) first = group_.who(rank) + ": " + words.substr(std::min<size_t>(1, words.size()));
    }
    return first;
  }

 private:
  static std::string key(const std::string& round, uint32_t rank) {
    return "multicast/" + round + "/" + std::to_string(rank);
  }
  std::vector<std::string> keys(const std::string& round) const {
    std::vector<std::string> keys;
    keys.reserve(group_.size());
    for (uint32_t rank = 0; rank < group_.size(); ++rank) keys.push_back(key(round, rank));
    return keys;
  }

  c10d::Store& store_;
  const Group& group_;
};

// Says what went wrong, or that all is well, and what else is to be said.
template <typename Work>
void attempt_and_say(Conversation& conversation, const std::string& round, const Work& work) {
  std::string words;
  try {
    words = kReady + work();
  } catch (const std::exception& thrown) {
    words = kRefusal + std::string(thrown.what());
  }
  conversation.say(round, words);
}

// Listens for a while, or until the last of them has come.
void await_completed(Multicast& multicast, std::chrono::milliseconds wait, std::set<uint64_t>* expected) {
  const auto until = std::chrono::steady_clock::now() + wait;
  const bool some = !expected->empty();
  for (auto now = until - wait; now < until && expected->empty() != some; now = std::chrono::steady_clock::now()) {
    pollfd events{multicast.event_fd(), POLLIN, 0};
    ::poll(&events, 1, static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(until - now).count()));
    for (const Multicast::Event& event : multicast.take_events()) {
      if (event.kind == Multicast::Event::Kind::kComplete) expected->erase(event.transfer);
    }
  }
}

// Each rank sends packets until all have heard all others. The transfers have the numbers of the ranks: operations
// begin with 1, so theirs are larger.
void probe(Conversation& conversation, const Group& group, Multicast& multicast) {
  std::vector<std::array<uint8_t, kProbeBytes>> heard(group.size());
  const std::array<uint8_t, kProbeBytes> own{};
  std::set<uint64_t> expected;
  for (uint32_t rank = 0; rank < group.size(); ++rank) {
    if (rank == group.rank()) continue;
    multicast.arm(rank, rank, heard[rank].data(), kProbeBytes, std::chrono::milliseconds(0));
    expected.insert(rank);
  }
  conversation.say("armed", {kReady});
  const std::string refusal = conversation.refusal("armed");
  const auto until = std::chrono::steady_clock::now() + kLongestProbe;
  for (bool said = false; refusal.empty();) {
    multicast.send(group.rank(), own.data(), kProbeBytes);
    await_completed(multicast, kProbeEvery, &expected);
    const bool over = std::chrono::steady_clock::now() >= until;
    if (!said && (expected.empty() || over)) {
      std::string silent;
      for (const uint64_t rank : expected) silent += (silent.empty() ? "" : ", ") + std::to_string(rank);
      const Multicast::Counters counters = multicast.counters();
      conversation.say("heard", expected.empty() ? std::string(1, kReady)
                                                 : kRefusal + ("no packet came from rank " + silent + " (" +
                                                               std::to_string(counters.packets_received) + " came, " +
                                                               std::to_string(counters.forged) + " with wrong tags)"));
      said = true;
    }
    // Who is not heard by then is waited for below, as long as the store waits.
    const bool long_over = std::chrono::steady_clock::now() >= until + kLongestProbe;
    if (said && (long_over || conversation.all_have_said("heard"))) break;
  }
  for (uint32_t rank = 0; rank < group.size(); ++rank) multicast.disarm(rank);
  multicast.cancel(group.rank());
  multicast.take_events();
}

}  // namespace

std::string try_multicast(Engine& engine, const std::shared_ptr<Group>& group, c10d::Store& store,
                          const MulticastWish& wish) {
  const Membership& member = group->membership();
  const Endpoint own = host_of(member.addresses[member.rank].tcp);
  uint32_t on_host = 0;
  for (const PeerAddress& address : member.addresses) {
    const Endpoint other = host_of(address.tcp);
    if (other.ipv6 != own.ipv6) return "some ranks listen at IPv4 addresses and some at IPv6 ones";
    on_host += other.host == own.host ? 1 : 0;
  }
  Conversation conversation(store, *group);
  MulticastSettings settings;
  settings.group = wish.address.empty() ? address_for(member.id, own.ipv6) : wish.address;
  const uint16_t ports = static_cast<uint16_t>(wish.last_port - wish.first_port) + 1;
  settings.port = static_cast<uint16_t>(wish.first_port + (member.id[3] << 8 | member.id[4]) % ports);
  settings.rank = member.rank;
  settings.num_ranks = member.size;
  settings.group_id = member.id;
  settings.secret = member.secret;
  settings.others_on_host = on_host > 1;
  settings.receive_buffer_bytes = kReceiveBufferBytes;
  settings.rate_bytes_per_s = wish.rates.up;
  attempt_and_say(conversation, "chunk", [&] {
    settings.interface_address = own.ipv6 ? interface_of(own.host) : own.host;
    return std::to_string(Multicast::largest_chunk(settings.group, settings.interface_address));
  });
  std::vector<std::string> chunks;
  if (std::string reason = conversation.refusal("chunk", &chunks); !reason.empty()) return reason;
  settings.chunk_bytes = UINT32_MAX;
  for (const std::string& chunk : chunks) {
    settings.chunk_bytes = std::min(settings.chunk_bytes, static_cast<uint32_t>(std::stoul(chunk)));
  }
  std::unique_ptr<Multicast> multicast;
  attempt_and_say(conversation, "made", [&] {
    multicast = Multicast::create(settings);
    return std::string();
  });
  if (std::string reason = conversation.refusal("made"); !reason.empty()) return reason;
  probe(conversation, *group, *multicast);
  if (std::string reason = conversation.refusal("heard"); !reason.empty()) return reason;
  engine.spread_by(group, std::move(multicast), wish.rates);
  // Nobody may send before all can receive what is told about it.
  conversation.say("used", {kReady});
  return conversation.refusal("used");
}

}  // namespace paceline
