// TCP: between hosts, and between ranks of one host where the kernel forbids anything better.
#pragma once

#include <memory>

#include "transport/transport.h"

namespace paceline::tcp {

struct Options {
  std::string interface;  // to listen on; empty: the address that the host's name resolves to
};

std::unique_ptr<Transport> create(const Options& options);

}  // namespace paceline::tcp
