#include "c10d/rendezvous.h"

#include <c10/util/Exception.h>
#include <sys/random.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace paceline {
namespace {

constexpr const char* kGroupKey = "group";

std::string rank_key(uint32_t rank) { return "rank/" + std::to_string(rank); }

std::vector<uint8_t> random_bytes(size_t size) {
  std::vector<uint8_t> bytes(size);
  TORCH_CHECK(::getrandom(bytes.data(), size, 0) == static_cast<ssize_t>(size), "getrandom gave no random bytes");
  return bytes;
}

// All at once where the store can: a question and an answer each cost a round trip.
std::vector<std::vector<uint8_t>> get_all(c10d::Store& store, const std::vector<std::string>& keys) {
  if (store.hasExtendedApi()) return store.multiGet(keys);
  std::vector<std::vector<uint8_t>> answers;
  answers.reserve(keys.size());
  for (const std::string& key : keys) answers.push_back(store.get(key));
  return answers;
}

std::vector<uint8_t> to_bytes(const std::string& text) { return {text.begin(), text.end()}; }

// The address, and what rank 0 knows of the links.
std::vector<uint8_t> encode(const PeerAddress& address, const std::string& links) {
  return to_bytes(to_text(address) + "\n" + links);
}

// Or, of a rank that cannot join: a mark, its host's name, and why. Python writes that (backend.py).
constexpr char kRefusal = '!';

void check_refusal(uint32_t rank, const std::vector<uint8_t>& bytes) {
  if (bytes.empty() || bytes[0] != kRefusal) return;
  const std::string text(bytes.begin() + 1, bytes.end());
  const size_t end = text.find('\n');
  TORCH_CHECK_WITH(DistBackendError, false, "rank ", rank, " (", text.substr(0, end),
                   ") cannot join the group: ", end == std::string::npos ? "" : text.substr(end + 1));
}

PeerAddress decode(uint32_t rank, const std::vector<uint8_t>& bytes, std::string* links) {
  check_refusal(rank, bytes);
  const std::string text(bytes.begin(), bytes.end());
  PeerAddress address = parse_address(text);
  if (rank == 0) *links = text.substr(std::min(to_text(address).size() + 1, text.size()));
  return address;
}

}  // namespace

Membership membership(std::span<const uint8_t, kGroupBytes> shared, uint32_t rank, uint32_t size) {
  Membership membership;
  membership.rank = rank;
  membership.size = size;
  std::copy_n(shared.begin(), membership.id.size(), membership.id.begin());
  std::copy_n(shared.begin() + static_cast<std::ptrdiff_t>(membership.id.size()), membership.secret.size(),
              membership.secret.begin());
  for (const uint8_t byte : shared.last<8>()) membership.epoch = membership.epoch << 8 | byte;
  return membership;
}

std::string to_text(const PeerAddress& address) { return address.host + "\n" + address.tcp + "\n" + address.shm; }

PeerAddress parse_address(const std::string& text) {
  const size_t first = text.find('\n');
  const size_t second = first == std::string::npos ? first : text.find('\n', first + 1);
  TORCH_CHECK(second != std::string::npos,
              "this address of a peer is none: do all ranks run the same version of Paceline?");
  const size_t third = std::min(text.find('\n', second + 1), text.size());
  return {text.substr(0, first), text.substr(first + 1, second - first - 1),
          text.substr(second + 1, third - second - 1)};
}

c10::intrusive_ptr<c10d::Store> fresh_part(const c10::intrusive_ptr<c10d::Store>& store, int rank) {
  const int64_t times = store->add("paceline/groups/" + std::to_string(rank), 1);
  return c10::make_intrusive<c10d::PrefixStore>("paceline/" + std::to_string(times), store);
}

Meeting meet(const std::shared_ptr<Engine>& engine, c10d::Store& store, uint32_t rank, uint32_t size,
             const Introduction& own) {
  std::vector<uint8_t> shared;
  if (rank == 0) {
    shared = random_bytes(kGroupBytes);
    shared[0] &= 0x7f;  // no refusal starts like that
    shared[0] |= 0x40;
    store.set(kGroupKey, shared);
  } else {
    shared = store.get(kGroupKey);
    check_refusal(0, shared);
  }
  TORCH_CHECK(shared.size() == kGroupBytes, "the rendezvous store holds a group of another version of Paceline");
  // First a member, then known to others: a peer may connect the moment our address is out.
  Meeting meeting;
  meeting.group =
      engine->join(membership(std::span<const uint8_t, kGroupBytes>(shared.data(), kGroupBytes), rank, size));
  try {
    PeerAddress address = engine->address();
    address.host = own.host;
    store.set(rank_key(rank), encode(address, rank == 0 ? own.links : ""));
    std::vector<std::string> keys;
    keys.reserve(size);
    for (uint32_t peer = 0; peer < size; ++peer) keys.push_back(rank_key(peer));
    const std::vector<std::vector<uint8_t>> answers = get_all(store, keys);
    std::vector<PeerAddress> addresses;
    addresses.reserve(size);
    for (uint32_t peer = 0; peer < size; ++peer) addresses.push_back(decode(peer, answers[peer], &meeting.links));
    engine->introduce(meeting.group, std::move(addresses));
  } catch (...) {
    engine->leave(meeting.group);
    throw;
  }
  return meeting;
}

}  // namespace paceline
