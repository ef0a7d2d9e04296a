// Whether packets reach all ranks of a group: asked once when it is made, of all at the same time, through the store.
#pragma once

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "engine/engine.h"

namespace paceline {

struct MulticastWish {
  std::string address;  // of the packets; empty: one of the group's own
  uint16_t first_port = 0, last_port = 0;
  PacketRates rates;
};

// Every rank calls it at the same point. On all of them transfers with many destinations go by multicast afterwards, or
// on none: then it returns why, in the same words everywhere. Nobody else may use the group's store meanwhile.
std::string try_multicast(Engine& engine, const std::shared_ptr<Group>& group, c10d::Store& store,
                          const MulticastWish& wish);

}  // namespace paceline
