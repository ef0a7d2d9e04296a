#include "engine/mailbox.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/attempt.h"
#include "engine/engine.h"
#include "engine/group.h"

namespace paceline {
namespace {

constexpr uint64_t kEagerBytes = 64 << 10;

// What a rank keeps of one sender's messages that nobody has asked for: this much, counted with what a message costs
// beside its bytes, and so many offers. Both sides count, so a sender that keeps to it is never refused.
constexpr uint64_t kCreditBytes = 1 << 20;
constexpr uint64_t kMessageBytes = 256;
constexpr uint32_t kMostOffers = 1 << 14;

uint64_t cost(uint64_t bytes) { return bytes + kMessageBytes; }

Clock::time_point deadline_of(const Message& message) {
  return message.timeout ? Clock::now() + *message.timeout : Clock::time_point::max();
}

}  // namespace

std::string Message::title() const {
  if (!receives) return "send to rank " + std::to_string(peer) + " (tag " + std::to_string(tag) + ")";
  const std::string from = peer < 0 ? "any rank" : "rank " + std::to_string(peer);
  return "recv from " + from + " (tag " + std::to_string(tag) + ")";
}

void Mailbox::send(const std::shared_ptr<Message>& message) {
  if (!group_.failure().empty()) return;  // end_unposted does the rest
  live_.insert(message);
  const auto peer = static_cast<uint32_t>(message->peer);
  message->number = next_number_[peer]++;
  message->deadline = deadline_of(*message);
  group_.engine().due_by(message->deadline);
  outbox_[peer].push_back(message);
  sending_[peer][message->number] = message;
  Connection* connection = group_.connection(peer, Lane::kMessages);
  if (group_.failure().empty() && group_.gone(peer, Lane::kMessages)) return group_.lose(peer, "");
  if (connection != nullptr) group_.mark(*connection);
  group_.flush_marked();
}

void Mailbox::receive(const std::shared_ptr<Message>& message) {
  message->receives = true;
  if (!group_.failure().empty()) return;  // end_unposted does the rest
  live_.insert(message);
  message->deadline = deadline_of(*message);
  group_.engine().due_by(message->deadline);
  for (auto entry = unexpected_.begin(); entry != unexpected_.end(); ++entry) {
    const IncomingPtr incoming = *entry;  // NOLINT(performance-unnecessary-copy-initialization): erased below
    if (incoming->tag != message->tag || (message->peer >= 0 && message->peer != incoming->peer)) continue;
    unexpected_.erase(entry);
    message->peer = incoming->peer;
    incoming->receive = message;
    deliver(incoming);
    if (group_.failure().empty() && group_.gone(incoming->peer, Lane::kMessages)) group_.lose(incoming->peer, "");
    return group_.flush_marked();
  }
  receives_.push_back(message);
  // Open connections, so that a peer that is gone or goes is noticed here.
  const uint32_t first = message->peer < 0 ? 0 : static_cast<uint32_t>(message->peer);
  const uint32_t last = message->peer < 0 ? group_.size() - 1 : first;
  for (uint32_t peer = first; peer <= last && group_.failure().empty(); ++peer) {
    if (peer == group_.rank()) continue;
    group_.connection(peer, Lane::kMessages);
    if (group_.failure().empty() && group_.gone(peer, Lane::kMessages)) group_.lose(peer, "");
  }
}

void Mailbox::end_unposted(const std::shared_ptr<Message>& message) noexcept {
  if (group_.failure().empty() || message->finished) return;
  if (!attempt([&] { finish(message, group_.failure_of(message->title())); })) {
    attempt([&] { finish(message, "out of memory"); });
  }
}

std::shared_ptr<Message> Mailbox::match(uint32_t peer, uint32_t tag) {
  for (auto entry = receives_.begin(); entry != receives_.end(); ++entry) {
    std::shared_ptr<Message> message = *entry;
    if (message->tag != tag || (message->peer >= 0 && message->peer != peer)) continue;
    receives_.erase(entry);
    message->peer = peer;
    return message;
  }
  return nullptr;
}

// What a frame of a message belongs to; nullptr after failing the group because the frame makes no sense.
Mailbox::IncomingPtr Mailbox::incoming_of(const Connection& connection, const FrameHeader& header) {
  const auto of_peer = accepted_.find(connection.peer());
  if (of_peer != accepted_.end()) {
    const auto accepted = of_peer->second.find(header.seq);
    if (accepted != of_peer->second.end()) {
      IncomingPtr incoming = accepted->second;
      const bool fits = header.total == incoming->bytes && header.offset == incoming->arrived &&
                        header.length <= incoming->bytes - incoming->arrived &&
                        (header.length > 0 || incoming->bytes == 0);
      if (fits) return incoming;
      group_.fail(connection.peer(), group_.who(connection.peer()) + " sent a message it had not offered");
      return nullptr;
    }
  }
  auto incoming = std::make_shared<Incoming>();
  incoming->peer = connection.peer();
  incoming->tag = header.id;
  incoming->number = header.seq;
  incoming->bytes = header.total;
  if (!in_order(*incoming) || !in_bounds(*incoming)) return nullptr;
  if (header.offset != 0 || header.length != header.total || header.length > kEagerBytes) {
    group_.fail(connection.peer(), group_.who(connection.peer()) + " sent a message it had not offered");
    return nullptr;
  }
  incoming->receive = match(incoming->peer, incoming->tag);
  if (incoming->receive != nullptr && incoming->receive->bytes != incoming->bytes) {
    deliver(incoming);  // fails, and says why
    return nullptr;
  }
  if (incoming->receive == nullptr) {
    incoming->payload.resize(header.length);
    unexpected_.push_back(incoming);
  }
  return incoming;
}

FrameHandler::Verdict Mailbox::on_header(Connection& connection, const FrameHeader& header, uint8_t** to) {
  if (header.type != FrameType::kMessage) return FrameHandler::Verdict::kTake;
  const IncomingPtr incoming = incoming_of(connection, header);
  if (incoming == nullptr) return FrameHandler::Verdict::kTake;
  *to = incoming->receive != nullptr ? incoming->receive->data + header.offset : incoming->payload.data();
  receiving_[&connection] = incoming;
  return FrameHandler::Verdict::kTake;
}

void Mailbox::on_frame(Connection& connection, const FrameHeader& header) {
  const uint32_t peer = connection.peer();
  if (header.type == FrameType::kMessage) {
    const auto found = receiving_.find(&connection);
    if (found == receiving_.end()) return;
    const IncomingPtr incoming = found->second;
    receiving_.erase(found);
    if (incoming->offered) {
      incoming->arrived += header.length;
      if (incoming->arrived < incoming->bytes) return;
      const auto accepted = accepted_.find(peer);
      accepted->second.erase(incoming->number);
      if (accepted->second.empty()) accepted_.erase(accepted);
      return finish(incoming->receive, "");
    }
    incoming->complete = true;
    if (incoming->receive == nullptr) return;
    if (incoming->payload.data() == nullptr) {
      release(*incoming);
      finish(incoming->receive, "");
    } else {
      deliver(incoming);  // matched while it arrived
    }
  } else if (header.type == FrameType::kOffer) {
    const auto incoming = std::make_shared<Incoming>();
    incoming->peer = peer;
    incoming->tag = header.id;
    incoming->number = header.seq;
    incoming->bytes = header.length;
    incoming->offered = true;
    if (!in_order(*incoming) || !in_bounds(*incoming)) return;
    incoming->receive = match(peer, header.id);
    if (incoming->receive != nullptr) {
      deliver(incoming);
    } else {
      unexpected_.push_back(incoming);
    }
  } else if (header.type == FrameType::kAccept) {
    on_accept(connection, header);
  } else if (header.type == FrameType::kCredit) {
    on_credit(connection, header);
  }
}

void Mailbox::on_accept(Connection& connection, const FrameHeader& header) {
  const uint32_t peer = connection.peer();
  auto& sending = sending_[peer];
  const auto found = sending.find(header.seq);
  if (found == sending.end() || !found->second->offered) {
    group_.fail(peer, group_.who(peer) + " accepted a message it was not offered");
    return;
  }
  const std::shared_ptr<Message> message = found->second;
  message->offered = false;  // accepted once
  --accounts_[peer].offers;
  payloads_[peer].push_back(message);
  group_.mark(connection);
}

void Mailbox::on_credit(Connection& connection, const FrameHeader& header) {
  Account& account = accounts_[connection.peer()];
  if (header.length > account.spent) {
    group_.fail(connection.peer(), group_.who(connection.peer()) + " gave credit for messages it was not sent");
    return;
  }
  account.spent -= header.length;
  group_.mark(connection);
}

// Messages and offers are numbered as they are sent; another number would take the place of a message that waits.
bool Mailbox::in_order(const Incoming& incoming) {
  if (incoming.number == next_arrival_[incoming.peer]++) return true;
  group_.fail(incoming.peer, group_.who(incoming.peer) + " sent a message out of order");
  return false;
}

bool Mailbox::in_bounds(const Incoming& incoming) {
  Account& account = accounts_[incoming.peer];
  if (incoming.offered) {
    ++account.offered;
  } else {
    account.kept += cost(std::min(incoming.bytes, kCreditBytes));
  }
  if (account.offered <= kMostOffers && account.kept <= kCreditBytes) return true;
  group_.fail(incoming.peer, group_.who(incoming.peer) + " sent more messages than it may before they are received");
  return false;
}

// A message that was kept, or might have been, has found its receive.
void Mailbox::release(const Incoming& incoming) {
  Account& account = accounts_[incoming.peer];
  account.freed += cost(incoming.bytes);
  if (account.freed < kCreditBytes / 2) return;
  Connection* connection = group_.connection(incoming.peer, Lane::kMessages);
  if (connection == nullptr) return;
  FrameHeader header;
  header.type = FrameType::kCredit;
  header.length = std::exchange(account.freed, 0);
  account.kept -= header.length;
  connection->enqueue_urgent(header);
  group_.mark(*connection);
}

// A message and a receive have found each other.
void Mailbox::deliver(const IncomingPtr& incoming) {
  const std::shared_ptr<Message>& message = incoming->receive;
  if (message->bytes != incoming->bytes) {
    const std::string reason = group_.who(incoming->peer) + " sent " + std::to_string(incoming->bytes) +
                               " bytes with tag " + std::to_string(incoming->tag) + ", and rank " +
                               std::to_string(group_.rank()) + " receives " + std::to_string(message->bytes) +
                               ": tensors of send and recv must have the same size";
    group_.fail(incoming->peer, reason);
    return;
  }
  if (!incoming->offered) {
    if (!incoming->complete) return;  // on_frame comes back
    if (!incoming->payload.empty()) std::memcpy(message->data, incoming->payload.data(), incoming->bytes);
    release(*incoming);
    finish(message, "");
    return;
  }
  --accounts_[incoming->peer].offered;
  accepted_[incoming->peer][incoming->number] = incoming;
  Connection* connection = group_.connection(incoming->peer, Lane::kMessages);
  if (connection == nullptr) return;
  FrameHeader header;
  header.type = FrameType::kAccept;
  header.seq = incoming->number;
  connection->enqueue_urgent(header);
  group_.mark(*connection);
}

void Mailbox::on_room(Connection& connection) {
  auto& outbox = outbox_[connection.peer()];
  Account& account = accounts_[connection.peer()];
  while (!outbox.empty() && connection.has_room()) {
    const std::shared_ptr<Message> message = outbox.front();
    const bool unasked = message->bytes <= kEagerBytes && account.spent + cost(message->bytes) <= kCreditBytes;
    if (!unasked && account.offers == kMostOffers) break;  // until one is accepted
    outbox.pop_front();
    OutFrame frame;
    frame.header.id = message->tag;
    frame.header.seq = message->number;
    frame.header.length = message->bytes;
    if (unasked) {
      account.spent += cost(message->bytes);
      frame.header.type = FrameType::kMessage;
      frame.header.total = message->bytes;
      frame.payload = message->data;
      frame.owner = message.get();
    } else {
      ++account.offers;
      frame.header.type = FrameType::kOffer;
      message->offered = true;
    }
    connection.enqueue(std::move(frame));
  }
  std::deque<std::shared_ptr<Message>>& payloads = payloads_[connection.peer()];
  while (!payloads.empty() && connection.has_room()) {
    Message& message = *payloads.front();
    OutFrame frame;
    frame.header.type = FrameType::kMessage;
    frame.header.id = message.tag;
    frame.header.seq = message.number;
    frame.header.offset = message.moved;
    frame.header.length = std::min(message.bytes - message.moved, connection.slice_bytes());
    frame.header.total = message.bytes;
    frame.payload = message.data + message.moved;
    frame.owner = &message;
    message.moved += frame.header.length;
    connection.enqueue(std::move(frame));
    if (message.moved == message.bytes) payloads.pop_front();
  }
}

void Mailbox::on_sent(Connection& connection, const OutFrame& frame) {
  const bool last = frame.header.offset + frame.header.length == frame.header.total;
  if (frame.header.type != FrameType::kMessage || !last) return;
  auto& sending = sending_[connection.peer()];
  const auto found = sending.find(frame.header.seq);
  if (found == sending.end()) return;
  const std::shared_ptr<Message> message = found->second;
  sending.erase(found);
  if (sending.empty()) sending_.erase(connection.peer());
  finish(message, "");
}

void Mailbox::finish(const std::shared_ptr<Message>& message, const std::string& error) {
  if (message->finished) return;
  message->finished = true;
  live_.erase(message);
  group_.engine().retire(message);
  message->on_done(error);
  group_.engine().nudge();
}

void Mailbox::fail() noexcept {
  outbox_.clear();
  payloads_.clear();
  sending_.clear();
  receives_.clear();
  unexpected_.clear();
  accepted_.clear();
  receiving_.clear();
  for (const auto& message : std::exchange(live_, {})) end_unposted(message);
}

void Mailbox::expire(const std::shared_ptr<Message>& message) {
  const auto timeout_ms = static_cast<double>(message->timeout.value_or(std::chrono::milliseconds(0)).count());
  const std::string seconds = std::to_string(timeout_ms / 1000.0).substr(0, 5);
  const std::string reason = "nothing came of it in " + seconds + " s";
  const auto waiting = std::find(receives_.begin(), receives_.end(), message);
  if (waiting != receives_.end()) {
    receives_.erase(waiting);
    finish(message, message->title() + ": timed out, " + reason);
    return;
  }
  group_.fail(message->peer, message->title() + " timed out: " + group_.who(static_cast<uint32_t>(message->peer)) +
                                 " does not take part");
}

// The connection has ended: what was half received on it will never be whole.
void Mailbox::forget(const Connection& connection) {
  const auto found = receiving_.find(&connection);
  if (found == receiving_.end()) return;
  std::erase(unexpected_, found->second);
  receiving_.erase(found);
}

bool Mailbox::needs(uint32_t peer) const {
  const auto sending = sending_.find(peer);
  if (sending != sending_.end() && !sending->second.empty()) return true;
  const auto accepted = accepted_.find(peer);
  if (accepted != accepted_.end() && !accepted->second.empty()) return true;
  for (const auto& [connection, incoming] : receiving_) {
    if (incoming->peer == peer && incoming->receive != nullptr) return true;
  }
  // A receive from any rank can be served as long as one is left.
  bool all_gone = true;
  for (uint32_t other = 0; other < group_.size(); ++other) {
    all_gone = all_gone && (other == group_.rank() || group_.gone(other, Lane::kMessages));
  }
  return std::any_of(receives_.begin(), receives_.end(), [&](const std::shared_ptr<Message>& message) {
    return message->peer == peer || (message->peer < 0 && all_gone);
  });
}

std::shared_ptr<Message> Mailbox::earliest() const {
  const auto first = std::min_element(live_.begin(), live_.end(),
                                      [](const auto& a, const auto& b) { return a->deadline < b->deadline; });
  return first == live_.end() ? nullptr : *first;
}

}  // namespace paceline
