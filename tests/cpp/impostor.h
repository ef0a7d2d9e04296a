// A rank that a test plays by hand: it knows the group's secret, and then says whatever the test wants.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "transport/frame.h"
#include "transport/handshake.h"
#include "transport/pulls.h"
#include "transport/stream.h"
#include "transport/transport.h"

namespace paceline::testing {

// A segment as Rings makes them, whose owner writes into it whatever it wants.
class Forgery {
 public:
  Forgery();
  ~Forgery();
  Forgery(const Forgery&) = delete;
  Forgery& operator=(const Forgery&) = delete;

  int fd() const { return fd_.get(); }
  void write(size_t where, uint64_t count);

 private:
  Fd fd_;
  size_t bytes_ = 0;
  uint8_t* memory_ = nullptr;
};

// Where the counts of a segment are.
constexpr size_t kConsumed = 0, kSent = 192, kReceived = 256;

class Impostor {
 public:
  // Connects to the engine by the transport named, without saying a word.
  Impostor(const Engine& engine, bool shm);

  // The whole handshake as an initiator. False when the engine does not answer as it should. Without `confirm`, all but
  // the last message.
  bool introduce(const Membership& member, uint32_t to, Lane lane, bool confirm = true);

  void send(std::span<const uint8_t> bytes);
  void send(const FrameHeader& header, std::span<const uint8_t> payload = {});
  // Passes a file as the segment of its payload, and where a word of its own lies, if it does.
  void share(int fd, const Pulls* pulls = nullptr);
  // From now on what it sends goes through this stream of the segment it has shared, and rings.
  void speak_through(const Stream& stream);
  // False when the stream ends or nothing comes for some seconds.
  bool receive(std::span<uint8_t> bytes);
  // The next frame that is none of those a rank may send at any time (posted, probe, rings, room, readable).
  std::optional<FrameHeader> receive_frame(std::vector<uint8_t>* payload = nullptr);
  // Half closes, as a rank that leaves.
  void shut();
  // Ends the stream with a reset instead of an orderly end.
  void reset();
  int fd() const { return fd_.get(); }

 private:
  std::unique_ptr<Transport> transport_;
  Fd fd_;
  std::optional<Stream> stream_;
};

}  // namespace paceline::testing
