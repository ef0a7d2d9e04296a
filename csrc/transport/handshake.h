// How two ranks of a group come to trust a connection. Both prove that they know the group's secret, which only
// members are meant to read from the rendezvous store; nothing said on these connections lets a listener do the same
// later. The store itself (torch's TCPStore) asks nobody who he is: who can reach it can read the secret.
//
//   step      initiator                                 acceptor
//   hello     version, group, epoch, ranks, lane,   ->  unknown group, wrong version, not for me, wrong proof, a nonce
//             nonce, proof = HMAC(secret, "hello"       that was used before: drop, log
//             all of these)
//   welcome                                         <-  nonce, accepted, proof = HMAC(secret, "acceptor accepts" (or
//                                                       "acceptor refuses") hello nonce); it refuses where both
//                                                       opened at once: the lower rank's stays
//   confirm   HMAC(secret, "initiator" hello nonce) ->  wrong proof: drop, log
//
// Each message has a fixed size, so that a slow or silent stranger costs one small buffer and a deadline. The hello is
// proven too, since it takes the place of a connection until it is confirmed.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "common/sha256.h"

namespace paceline {

constexpr uint16_t kProtocolVersion = 6;

using GroupId = std::array<uint8_t, 16>;
using Secret = std::array<uint8_t, 32>;
using Nonce = std::array<uint8_t, 16>;

// Collectives, point-to-point messages and the operations of teams have connections of their own, so that none waits
// behind another.
enum class Lane : uint8_t { kCollective = 0, kMessages = 1, kTeams = 2 };
constexpr std::array<Lane, 3> kLanes = {Lane::kCollective, Lane::kMessages, Lane::kTeams};

struct Hello {
  uint16_t version = kProtocolVersion;
  Lane lane = Lane::kCollective;
  GroupId group{};
  uint64_t epoch = 0;
  uint32_t from_rank = 0;
  uint32_t to_rank = 0;
  Nonce nonce{};
};

struct Welcome {
  bool accepted = true;
  Nonce nonce{};
  Digest proof{};
};

constexpr size_t kHelloFieldBytes = 60;
constexpr size_t kHelloBytes = kHelloFieldBytes + sizeof(Digest);
constexpr size_t kWelcomeBytes = 56;
constexpr size_t kConfirmBytes = 32;

using HelloBytes = std::array<uint8_t, kHelloBytes>;
using WelcomeBytes = std::array<uint8_t, kWelcomeBytes>;

HelloBytes encode(const Hello& hello, const Secret& secret);
WelcomeBytes encode(const Welcome& welcome);

// False when the bytes are not a hello of any version (version is to be checked by the caller, who can log it).
bool decode(std::span<const uint8_t, kHelloBytes> bytes, Hello* hello);
bool decode(std::span<const uint8_t, kWelcomeBytes> bytes, Welcome* welcome);

bool proven(const HelloBytes& hello, const Secret& secret);
Digest prove_acceptor(const Secret& secret, const HelloBytes& hello, const Nonce& nonce, bool accepted);
Digest prove_initiator(const Secret& secret, const HelloBytes& hello, const Nonce& nonce);

Nonce random_nonce();

}  // namespace paceline
