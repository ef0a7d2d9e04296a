// Connections that are not trusted yet: opened by us or by somebody. See transport/handshake.h for the protocol.
//
//   state      initiated by us                          accepted from somebody
//   (retry)    waits a moment: nobody is let in now     -
//   connecting waits for the socket; sends hello        -
//   hello      -                                        waits for hello; answers welcome or drops
//   welcome    waits for welcome; sends confirm: open   -
//   confirm    -                                        waits for confirm: open
//
// When two ranks open at once, the lower rank's connection stays.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/fd.h"
#include "engine/connection.h"
#include "engine/operation.h"
#include "engine/poller.h"
#include "transport/handshake.h"
#include "transport/transport.h"

namespace paceline {

class Engine;
class Group;

class Introductions {
 public:
  explicit Introductions(Engine& engine);
  ~Introductions();

  void listen(Transport& transport);
  void open(Group& group, uint32_t peer, Lane lane);
  // Forgets whatever is under way for a group. Peers that count as connected already are told these last words.
  void forget(const Group& group, const OutFrame& last_words) noexcept;
  // Drops strangers that take too long, and knocks again where we were not let in. Returns when to be called again.
  Clock::time_point tick(Clock::time_point now);

 private:
  class Door;
  class Stranger;
  friend class Stranger;

  // A connection to be opened a little later.
  struct Retry {
    Group* group = nullptr;
    uint32_t peer = 0;
    Lane lane = Lane::kCollective;
    std::chrono::milliseconds delay{0};
    Clock::time_point at;
  };

  void knock(Group& group, uint32_t peer, Lane lane, std::chrono::milliseconds delay);
  Fd connect(Transport& transport, const std::string& address, bool* last);
  void admit(Transport& transport, Fd fd, bool last);
  // Whether there was one: then a file can be opened in its place. It comes back when there is room again.
  bool give_up_spare();
  Clock::time_point regain_spare(Clock::time_point now);
  template <typename... Arguments>
  void add(Transport& transport, Fd fd, Arguments&&... arguments);
  void drop(Stranger& stranger);
  void cancel(const Group& group, uint32_t peer, Lane lane);

  Engine& engine_;
  // When no file is left, one connection can be opened in the place of this one: to tell a peer so.
  Fd spare_;
  std::vector<std::unique_ptr<Door>> doors_;
  std::vector<std::unique_ptr<Stranger>> strangers_;
  std::vector<Retry> retries_;
};

}  // namespace paceline
