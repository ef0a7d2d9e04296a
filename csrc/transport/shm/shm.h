// Ranks of one host: small frames over a Unix socket, large payload pulled once, straight from the peer's memory,
// by process_vm_readv. No segment to create, to size or to leave behind when a process is killed.
#pragma once

#include <memory>

#include "transport/transport.h"

namespace paceline::shm {

// nullptr where abstract Unix sockets cannot be had.
std::unique_ptr<Transport> create();

}  // namespace paceline::shm
