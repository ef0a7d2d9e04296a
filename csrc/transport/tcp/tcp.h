// TCP: between hosts, and between ranks of one host where the kernel forbids anything better.
#pragma once

#include <memory>

#include "transport/transport.h"

namespace paceline::tcp {

struct Options {
  std::string interface;  // name of the interface to listen on; empty: see hostname
  std::string hostname;   // address to listen on where no interface is named; empty: what the host's name resolves to
};

std::unique_ptr<Transport> create(const Options& options);

}  // namespace paceline::tcp
