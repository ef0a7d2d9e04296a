// Any bytes as hello and welcome: decoding is safe, and what is decoded comes out of encode and decode unchanged.
#include <algorithm>

#include "input.h"
#include "transport/handshake.h"

using namespace paceline;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  testing::Input input(data, size);
  HelloBytes hello_bytes{};
  const std::span<const uint8_t> first = input.take(kHelloBytes);
  std::copy(first.begin(), first.end(), hello_bytes.begin());
  Hello hello;
  if (decode(std::span<const uint8_t, kHelloBytes>(hello_bytes), &hello)) {
    const HelloBytes encoded = encode(hello, Secret{});
    Hello again;
    testing::require(decode(std::span<const uint8_t, kHelloBytes>(encoded), &again), "a hello that cannot be read");
    testing::require(again.group == hello.group && again.epoch == hello.epoch && again.nonce == hello.nonce &&
                         again.from_rank == hello.from_rank && again.to_rank == hello.to_rank &&
                         again.version == hello.version && again.lane == hello.lane,
                     "a hello that is encoded differently");
    testing::require(proven(encoded, Secret{}), "a hello that is not proven");
  }
  WelcomeBytes welcome_bytes{};
  const std::span<const uint8_t> second = input.take(kWelcomeBytes);
  std::copy(second.begin(), second.end(), welcome_bytes.begin());
  Welcome welcome;
  if (decode(std::span<const uint8_t, kWelcomeBytes>(welcome_bytes), &welcome)) {
    testing::require(encode(welcome) == welcome_bytes, "a welcome that is encoded differently");
  }
  return 0;
}
