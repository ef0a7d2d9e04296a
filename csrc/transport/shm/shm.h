// Ranks of one host: frames over a Unix socket, large payload through rings of shared memory that are passed over it.
// The memory has no name, so nothing is left behind when a process is killed.
#pragma once

#include <memory>

#include "transport/transport.h"

namespace paceline::shm {

// nullptr where abstract Unix sockets cannot be had.
std::unique_ptr<Transport> create();

}  // namespace paceline::shm
