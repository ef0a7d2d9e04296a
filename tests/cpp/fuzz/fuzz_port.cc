// A stranger at the listening port of an engine that waits for members: hellos with some fields wrong, wrong proofs,
// right ones, pieces, and the end of the stream. The engine lets go of it, and no member's place stays taken.
#include <array>

#include "engine/engine.h"
#include "impostor.h"
#include "input.h"
#include "ranks.h"

using namespace paceline;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Engine engine({"lo", true});
  testing::Input input(data, size);
  const uint8_t choices = input.byte();
  const Membership member = testing::membership(0, 3);
  const std::shared_ptr<Group> group = engine.join(member);
  engine.introduce(group, std::vector<PeerAddress>(3, engine.address()));
  {
    testing::Impostor stranger(engine, (choices & 1) != 0);
    Hello hello;
    hello.group = member.id;
    hello.epoch = member.epoch;
    hello.from_rank = 1;
    if ((choices & 2) != 0) hello.version = static_cast<uint16_t>(input.number(2));
    if ((choices & 4) != 0) hello.epoch = input.number(8);
    if ((choices & 8) != 0) hello.from_rank = static_cast<uint32_t>(input.number(4));
    if ((choices & 16) != 0) hello.to_rank = static_cast<uint32_t>(input.number(4));
    if ((choices & 32) != 0) hello.lane = static_cast<Lane>(input.byte());
    const HelloBytes bytes = encode(hello, member.secret);
    if ((choices & 64) != 0) {
      stranger.send(input.take(input.byte()));
    } else {
      stranger.send(bytes);
      WelcomeBytes answer;
      Welcome welcome;
      const bool welcomed =
          stranger.receive(answer) && decode(std::span<const uint8_t, kWelcomeBytes>(answer), &welcome);
      if (welcomed && (choices & 128) != 0) stranger.send(prove_initiator(member.secret, bytes, welcome.nonce));
    }
    while (!input.empty()) stranger.send(input.take(32));
    stranger.shut();
    // The engine closes its side when it has read the end, whatever was said before.
    std::array<uint8_t, 1> byte;
    int rounds = 0;
    while (stranger.receive(byte))
      testing::require(++rounds < 1 << 20, "an engine that talks to a stranger without end");
  }
  engine.leave(group);
  return 0;
}
