// SHA-256 and HMAC-SHA-256 (FIPS 180-4, RFC 2104), for the handshake only: a hundred lines instead of a dependency
// on a crypto library that every wheel would have to carry.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace paceline {

using Digest = std::array<uint8_t, 32>;

Digest sha256(std::span<const uint8_t> data);
Digest hmac_sha256(std::span<const uint8_t> key, std::span<const uint8_t> data);

// Compares without telling by its duration where the first difference is.
bool equal_in_constant_time(const Digest& a, const Digest& b);

}  // namespace paceline
