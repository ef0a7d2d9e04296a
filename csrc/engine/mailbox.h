// Point-to-point messages of one group: matched by sender and tag, in the order they were sent.
//
// Small messages are sent at once and kept by the receiver until they are wanted, as far as the sender's credit goes:
// what it has sent so and the receiver has not passed on yet. Large ones, and small ones beyond the credit, are
// offered, and sent when a receive matches. So messages that nobody wants cost the receiver little memory, whatever a
// sender does, and two ranks that send to each other first and receive later do not block. Nothing stops the stream,
// which carries more than messages.
//
//   sender                         receiver
//   small, and credit  message ->  matches a receive: straight to its buffer; otherwise kept
//                              <-  credit, now and then, for what has found its receive
//   otherwise          offer   ->  when matched:
//                              <-  accept
//                      message ->  in slices, straight to the receive's buffer; whatever else is to be said goes
//                      between
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "engine/connection.h"
#include "engine/operation.h"

namespace paceline {

class Group;

struct Message {
  int64_t peer = 0;  // of a receive: -1 for any sender; set to the sender when it is matched
  uint32_t tag = 0;
  uint8_t* data = nullptr;
  uint64_t bytes = 0;
  // Counted from the call. Without one, from when somebody waits for it (Engine::hurry).
  std::optional<std::chrono::milliseconds> timeout;
  std::function<void(const std::string& error)> on_done;

  // Set by the engine.
  bool offered = false;  // a send that may be accepted
  uint64_t moved = 0;    // of a send that was accepted: bytes handed to the connection
  bool receives = false;
  uint64_t number = 0;  // of a send: among those to the same peer
  Clock::time_point deadline = Clock::time_point::max();
  bool finished = false;

  std::string title() const;
};

class Mailbox {
 public:
  explicit Mailbox(Group& group) : group_(group) {}

  void send(const std::shared_ptr<Message>& message);
  void receive(const std::shared_ptr<Message>& message);
  // After a call that was broken off: a message that the group does not know of ends as well.
  void end_unposted(const std::shared_ptr<Message>& message) noexcept;

  FrameHandler::Verdict on_header(Connection& connection, const FrameHeader& header, uint8_t** to);
  void on_frame(Connection& connection, const FrameHeader& header);
  void on_sent(Connection& connection, const OutFrame& frame);
  void on_room(Connection& connection);

  bool idle() const { return live_.empty(); }

  void fail() noexcept;
  bool needs(uint32_t peer) const;
  void forget(const Connection& connection);
  std::shared_ptr<Message> earliest() const;
  // Its time is over: gives up this message alone where no byte of it can be on its way, otherwise the group.
  void expire(const std::shared_ptr<Message>& message);

 private:
  // A message that nobody has asked for yet, or that is being received.
  struct Incoming {
    uint32_t peer = 0;
    uint32_t tag = 0;
    uint64_t number = 0;
    uint64_t bytes = 0;
    bool offered = false;
    bool complete = false;
    uint64_t arrived = 0;  // bytes of one that was offered
    std::vector<uint8_t> payload;
    std::shared_ptr<Message> receive;  // once matched
  };

  using IncomingPtr = std::shared_ptr<Incoming>;

  // What one peer has of our messages without having asked for them, and we of its.
  struct Account {
    uint64_t spent = 0;    // of our credit
    uint32_t offers = 0;   // of ours, not accepted yet
    uint64_t kept = 0;     // of its credit
    uint64_t freed = 0;    // part of that which it has not been told of
    uint32_t offered = 0;  // of its offers, not accepted yet
  };

  // Whether the peer may send this unasked; fails the group where it may not.
  bool in_order(const Incoming& incoming);
  bool in_bounds(const Incoming& incoming);
  void release(const Incoming& incoming);
  IncomingPtr incoming_of(const Connection& connection, const FrameHeader& header);
  void on_accept(Connection& connection, const FrameHeader& header);
  void on_credit(Connection& connection, const FrameHeader& header);
  std::shared_ptr<Message> match(uint32_t peer, uint32_t tag);
  void deliver(const IncomingPtr& incoming);
  void finish(const std::shared_ptr<Message>& message, const std::string& error);

  Group& group_;
  std::set<std::shared_ptr<Message>> live_;                          // all that have not ended, wherever else they are
  std::map<uint32_t, std::deque<std::shared_ptr<Message>>> outbox_;  // not handed to the connection yet
  std::map<uint32_t, std::deque<std::shared_ptr<Message>>> payloads_;         // accepted, not handed over completely
  std::map<uint32_t, std::map<uint64_t, std::shared_ptr<Message>>> sending_;  // by number: not done yet
  std::map<uint32_t, uint64_t> next_number_;                                  // of a message to this rank
  std::map<uint32_t, uint64_t> next_arrival_;                                 // of a message from this rank
  std::map<uint32_t, Account> accounts_;
  std::list<std::shared_ptr<Message>> receives_;                  // not matched yet, in the order of the calls
  std::list<IncomingPtr> unexpected_;                             // in the order of arrival
  std::map<uint32_t, std::map<uint64_t, IncomingPtr>> accepted_;  // payload is on its way
  std::map<const Connection*, IncomingPtr> receiving_;
};

}  // namespace paceline
