// TCP: between hosts, and between ranks of one host where the kernel forbids anything better.
#pragma once

#include <memory>

#include "transport/transport.h"

namespace paceline::tcp {

struct Options {
  std::string interface;  // to listen on; empty: what the host's name resolves to, or else what the master can reach
  // The host of the job's store; empty: not known.
  std::string master{};  // NOLINT(readability-redundant-member-init): may be left out
};

std::unique_ptr<Transport> create(const Options& options);

}  // namespace paceline::tcp
