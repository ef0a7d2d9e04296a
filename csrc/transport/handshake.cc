#include "transport/handshake.h"

#include <sys/random.h>

#include <cerrno>
#include <cstring>
#include <string_view>
#include <system_error>
#include <vector>

#include "transport/bytes.h"

namespace paceline {
namespace {

constexpr std::array<uint8_t, 8> kHelloMagic = {'p', 'a', 'c', 'e', 'l', 'i', 'n', 'e'};
constexpr std::array<uint8_t, 7> kWelcomeMagic = {'w', 'e', 'l', 'c', 'o', 'm', 'e'};

Digest prove(std::string_view role, const Secret& secret, std::span<const uint8_t> hello,
             std::span<const uint8_t> nonce = {}) {
  std::vector<uint8_t> text(role.begin(), role.end());
  text.insert(text.end(), hello.begin(), hello.end());
  text.insert(text.end(), nonce.begin(), nonce.end());
  return hmac_sha256(secret, text);
}

Digest prove_hello(const Secret& secret, const HelloBytes& hello) {
  return prove("hello", secret, std::span(hello).first<kHelloFieldBytes>());
}

}  // namespace

HelloBytes encode(const Hello& hello, const Secret& secret) {
  HelloBytes bytes{};
  uint8_t* at = bytes.data();
  std::memcpy(at, kHelloMagic.data(), 8);
  ByteWriter head(at + 8);
  head.put(hello.version);
  head.put(static_cast<uint8_t>(hello.lane));
  head.put(uint8_t{0});
  std::memcpy(at + 12, hello.group.data(), 16);
  ByteWriter tail(at + 28);
  tail.put(hello.epoch);
  tail.put(hello.from_rank);
  tail.put(hello.to_rank);
  std::memcpy(at + 44, hello.nonce.data(), 16);
  const Digest proof = prove_hello(secret, bytes);
  std::memcpy(at + kHelloFieldBytes, proof.data(), proof.size());
  return bytes;
}

bool decode(std::span<const uint8_t, kHelloBytes> bytes, Hello* hello) {
  const uint8_t* at = bytes.data();
  if (std::memcmp(at, kHelloMagic.data(), 8) != 0) return false;
  ByteReader head(at + 8);
  hello->version = head.get<uint16_t>();
  const auto lane = head.get<uint8_t>();
  if (lane >= kLanes.size()) return false;
  hello->lane = static_cast<Lane>(lane);
  std::memcpy(hello->group.data(), at + 12, 16);
  ByteReader tail(at + 28);
  hello->epoch = tail.get<uint64_t>();
  hello->from_rank = tail.get<uint32_t>();
  hello->to_rank = tail.get<uint32_t>();
  std::memcpy(hello->nonce.data(), at + 44, 16);
  return true;
}

WelcomeBytes encode(const Welcome& welcome) {
  WelcomeBytes bytes{};
  std::memcpy(bytes.data(), kWelcomeMagic.data(), 7);
  bytes[7] = welcome.accepted ? 1 : 0;
  std::memcpy(bytes.data() + 8, welcome.nonce.data(), 16);
  std::memcpy(bytes.data() + 24, welcome.proof.data(), 32);
  return bytes;
}

bool decode(std::span<const uint8_t, kWelcomeBytes> bytes, Welcome* welcome) {
  if (std::memcmp(bytes.data(), kWelcomeMagic.data(), 7) != 0 || bytes[7] > 1) return false;
  welcome->accepted = bytes[7] == 1;
  std::memcpy(welcome->nonce.data(), bytes.data() + 8, 16);
  std::memcpy(welcome->proof.data(), bytes.data() + 24, 32);
  return true;
}

bool proven(const HelloBytes& hello, const Secret& secret) {
  Digest proof;
  std::memcpy(proof.data(), hello.data() + kHelloFieldBytes, proof.size());
  return equal_in_constant_time(proof, prove_hello(secret, hello));
}

Digest prove_acceptor(const Secret& secret, const HelloBytes& hello, const Nonce& nonce, bool accepted) {
  return prove(accepted ? "acceptor accepts" : "acceptor refuses", secret, hello, nonce);
}

Digest prove_initiator(const Secret& secret, const HelloBytes& hello, const Nonce& nonce) {
  return prove("initiator", secret, hello, nonce);
}

Nonce random_nonce() {
  Nonce nonce;
  if (::getrandom(nonce.data(), nonce.size(), 0) != static_cast<ssize_t>(nonce.size())) {
    throw std::system_error(errno, std::generic_category(), "getrandom");
  }
  return nonce;
}

}  // namespace paceline
