// How the ranks of a group find and come to trust each other: through the store that torch.distributed gives us.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "engine/engine.h"

namespace paceline {

// A part of the store that no earlier group has written to: each rank counts how often it was there.
c10::intrusive_ptr<c10d::Store> fresh_part(const c10::intrusive_ptr<c10d::Store>& store, int rank);

// What a rank says of itself, besides its addresses.
struct Introduction {
  std::string host;   // its name, for people
  std::string links;  // what rank 0 knows of the links from groups before; empty: nothing
};

struct Meeting {
  std::shared_ptr<Group> group;
  std::string links;  // as rank 0 said: the same on all ranks
};

// What all members of a group share: its id, its secret and its epoch.
constexpr size_t kGroupBytes = sizeof(GroupId) + sizeof(Secret) + 8;
Membership membership(std::span<const uint8_t, kGroupBytes> shared, uint32_t rank, uint32_t size);

// An address as text, to be published: lines with the host's name for people and the two addresses.
std::string to_text(const PeerAddress& address);
PeerAddress parse_address(const std::string& text);

// Blocks until every rank has published its address, at most for the store's timeout.
Meeting meet(const std::shared_ptr<Engine>& engine, c10d::Store& store, uint32_t rank, uint32_t size,
             const Introduction& own);

}  // namespace paceline
