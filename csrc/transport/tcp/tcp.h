// TCP: between hosts, and between ranks of one host where the kernel forbids anything better.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "transport/transport.h"

namespace paceline::tcp {

struct Options {
  std::string interface;  // to listen on; empty: what the host's name resolves to, or else what the master can reach
  std::chrono::seconds host_timeout{0};  // a stream ends when the other host has not answered for so long; 0: never
  // TCP's congestion control, as the kernel names it (cubic, bbr); empty: the system's own.
  std::string congestion = {};  // NOLINT(readability-redundant-member-init): others need not name it
  // The host of the job's store; empty: not known.
  std::string master = {};  // NOLINT(readability-redundant-member-init): others need not name it
};

std::unique_ptr<Transport> create(const Options& options);

}  // namespace paceline::tcp
