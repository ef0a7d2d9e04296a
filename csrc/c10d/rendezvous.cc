#include "c10d/rendezvous.h"

#include <c10/util/Exception.h>
#include <sys/random.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace paceline {
namespace {

constexpr const char* kGroupKey = "group";
constexpr size_t kGroupBytes = sizeof(GroupId) + sizeof(Secret) + 8;

std::string rank_key(uint32_t rank) { return "rank/" + std::to_string(rank); }

std::vector<uint8_t> random_bytes(size_t size) {
  std::vector<uint8_t> bytes(size);
  TORCH_CHECK(::getrandom(bytes.data(), size, 0) == static_cast<ssize_t>(size), "getrandom gave no random bytes");
  return bytes;
}

// Three lines: the host's name for people, and the two addresses.
std::vector<uint8_t> encode(const PeerAddress& address) {
  const std::string text = address.host + "\n" + address.tcp + "\n" + address.shm;
  return {text.begin(), text.end()};
}

PeerAddress decode(const std::vector<uint8_t>& bytes) {
  const std::string text(bytes.begin(), bytes.end());
  const size_t first = text.find('\n');
  const size_t second = text.find('\n', first + 1);
  TORCH_CHECK(first != std::string::npos && second != std::string::npos,
              "the rendezvous store holds an address that is none: do all ranks run the same version of Paceline?");
  return {text.substr(0, first), text.substr(first + 1, second - first - 1), text.substr(second + 1)};
}

}  // namespace

c10::intrusive_ptr<c10d::Store> fresh_part(const c10::intrusive_ptr<c10d::Store>& store, int rank) {
  const int64_t times = store->add("paceline/groups/" + std::to_string(rank), 1);
  return c10::make_intrusive<c10d::PrefixStore>("paceline/" + std::to_string(times), store);
}

std::shared_ptr<Group> meet(const std::shared_ptr<Engine>& engine, c10d::Store& store, uint32_t rank, uint32_t size,
                            const std::string& host) {
  if (rank == 0) store.set(kGroupKey, random_bytes(kGroupBytes));
  const std::vector<uint8_t> shared = store.get(kGroupKey);
  TORCH_CHECK(shared.size() == kGroupBytes, "the rendezvous store holds a group of another version of Paceline");
  Membership membership;
  membership.rank = rank;
  membership.size = size;
  std::copy_n(shared.begin(), membership.id.size(), membership.id.begin());
  std::copy_n(shared.begin() + static_cast<std::ptrdiff_t>(membership.id.size()), membership.secret.size(),
              membership.secret.begin());
  for (size_t i = kGroupBytes - 8; i < kGroupBytes; ++i) membership.epoch = membership.epoch << 8 | shared[i];

  // First a member, then known to others: a peer may connect the moment our address is out.
  std::shared_ptr<Group> group = engine->join(std::move(membership));
  try {
    PeerAddress own = engine->address();
    own.host = host;
    store.set(rank_key(rank), encode(own));
    std::vector<PeerAddress> addresses;
    addresses.reserve(size);
    for (uint32_t peer = 0; peer < size; ++peer) addresses.push_back(decode(store.get(rank_key(peer))));
    engine->introduce(group, std::move(addresses));
  } catch (...) {
    engine->leave(group);
    throw;
  }
  return group;
}

}  // namespace paceline
