#include "engine/group.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "common/attempt.h"
#include "common/log.h"
#include "engine/engine.h"

namespace paceline {
namespace {

// How long other ranks have to say whether they are there, when an operation has run out of time.
constexpr auto kInquiryTime = std::chrono::milliseconds(1000);

// How long a peer that does not let us in is not blamed yet.
constexpr auto kSuspicionTime = std::chrono::milliseconds(100);

bool belongs(FrameType type, Lane lane) {
  switch (type) {
    case FrameType::kData:
    case FrameType::kPosted:
      return lane != Lane::kMessages;
    case FrameType::kAt:
    case FrameType::kPulled:
    case FrameType::kArmed:
    case FrameType::kCast:
    case FrameType::kLacks:
    case FrameType::kHave:
    case FrameType::kWant:
    case FrameType::kRepair:
    case FrameType::kOver:
      return lane == Lane::kCollective;
    case FrameType::kMessage:
    case FrameType::kOffer:
    case FrameType::kAccept:
    case FrameType::kCredit:
    case FrameType::kArrived:
    case FrameType::kDecided:
      return lane == Lane::kMessages;
    default:
      return true;
  }
}

}  // namespace

std::string in_seconds(std::chrono::milliseconds duration) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f s", static_cast<double>(duration.count()) / 1000.0);
  return text.data();
}

Group::Group(Engine& engine, Membership membership)
    : engine_(engine),
      membership_(std::move(membership)),
      peers_(membership_.size),
      collectives_(*this, *this, Lane::kCollective),
      decisions_(*this),
      mailbox_(*this),
      teams_(*this) {}

Group::~Group() = default;

std::string Group::who(uint32_t peer) const {
  const std::string rank = "rank " + std::to_string(peer);
  return peer < membership_.addresses.size() ? rank + " (" + membership_.addresses[peer].host + ")" : rank;
}

Connection* Group::connection(uint32_t peer, Lane lane) {
  const LaneState& state = peers_[peer].lanes[index(lane)];
  if (state.connection != nullptr) return state.connection.get();
  const bool known = !membership_.addresses.empty();  // peers may send before this rank can
  if (known && state.opening == Opening::kNone && peers_[peer].ending.empty() && !left_ && failure_.empty()) {
    engine_.introductions().open(*this, peer, lane);
  }
  return state.connection.get();
}

void Group::spread_by(std::unique_ptr<Multicast> multicast, PacketRates rates) {
  mover_ = std::make_unique<MulticastMover>(std::move(multicast), rates);
  packet_watcher_ = std::make_unique<PacketWatcher>(*this, mover_->multicast());
  engine_.poller().add(mover_->multicast().event_fd(), EPOLLIN, packet_watcher_.get());
  collectives_.spread_by(*mover_);
}

std::unique_ptr<MulticastMover> Group::take_mover() {
  collectives_.stop_spreading();
  return std::move(mover_);
}

void Group::introduce(std::vector<PeerAddress> addresses) {
  membership_.addresses = std::move(addresses);
  for (uint32_t peer = 0; peer < size(); ++peer) {
    for (const Lane lane : kLanes) {
      if (peer != rank() && failure_.empty()) reopen(peer, lane);
    }
  }
}

void Group::introduce(uint32_t peer, PeerAddress address) {
  membership_.addresses[peer] = std::move(address);
  Peer& state = peers_[peer];
  const bool over = std::all_of(state.lanes.begin(), state.lanes.end(), [](const LaneState& lane) {
    return lane.connection == nullptr && lane.opening != Opening::kInitiated && lane.opening != Opening::kAccepting;
  });
  if (!state.ending.empty() && over) state = Peer();
  for (const Lane lane : kLanes) {
    if (failure_.empty()) reopen(peer, lane);
  }
}

bool Group::needs(uint32_t peer, Lane lane) const {
  switch (lane) {
    case Lane::kCollective:
      return collectives_.needs(peer);
    case Lane::kMessages:
      return mailbox_.needs(peer) || decisions_.needs_all();
    case Lane::kTeams:
      return teams_.needs(peer);
  }
  return false;
}

void Group::reopen(uint32_t peer, Lane lane) {
  if (needs(peer, lane)) connection(peer, lane);
  if (gone(peer, lane)) lose(peer, "");
}

void Group::attach(std::unique_ptr<Connection> connection) {
  LaneState& state = peers_[connection->peer()].lanes[index(connection->lane())];
  state.opening = Opening::kOpen;
  state.connection = std::move(connection);
  if (!failure_.empty()) return tell_failure(*state.connection);  // it comes too late, but hears why
  mark(*state.connection);
  if (state.connection->lane() == Lane::kCollective) collectives_.attached(*state.connection);
  teams_.attached(*state.connection);
  if (state.connection->lane() == Lane::kMessages) {
    // It may have been opened to ask.
    const std::shared_ptr<Operation> asking =
        inquiry_ != nullptr ? collectives_.find(inquiry_->seq) : collectives_.earliest(&Operation::posted_at);
    if (asking != nullptr) probe(state.connection->peer(), *asking);
    decisions_.attached(state.connection->peer());
  }
  flush_marked();
}

void Group::mark(Connection& connection) {
  if (std::find(marked_.begin(), marked_.end(), &connection) == marked_.end()) marked_.push_back(&connection);
}

void Group::flush_marked() {
  while (!marked_.empty()) {
    Connection* connection = marked_.back();
    marked_.pop_back();
    connection->flush();
  }
}

FrameHandler::Verdict Group::on_header(Connection& connection, const FrameHeader& header, uint8_t** to) {
  switch (header.type) {
    case FrameType::kError: {
      std::vector<uint8_t>& text = error_texts_[&connection];
      text.resize(header.length);
      *to = text.data();
      return Verdict::kTake;
    }
    case FrameType::kBye:
    case FrameType::kProbe:
    case FrameType::kStatus:
      return Verdict::kTake;
    default:
      break;
  }
  if (!belongs(header.type, connection.lane())) {
    fail(connection.peer(), who(connection.peer()) + " sent a frame on the wrong connection");
    return Verdict::kTake;
  }
  if (header.type == FrameType::kArrived || header.type == FrameType::kDecided) {
    decisions_.on_header(connection, header, to);
    return Verdict::kTake;
  }
  if (header.type == FrameType::kGivenUp) {
    teams_.on_header(connection, header, to);
    return Verdict::kTake;
  }
  switch (connection.lane()) {
    case Lane::kCollective:
      return collectives_.on_header(connection, header, to);
    case Lane::kMessages:
      return mailbox_.on_header(connection, header, to);
    case Lane::kTeams:
      teams_.on_header(connection, header, to);
  }
  return Verdict::kTake;
}

void Group::on_frame(Connection& connection, const FrameHeader& header, const uint8_t* bytes) {
  const uint32_t peer = connection.peer();
  switch (header.type) {
    case FrameType::kError: {
      const std::vector<uint8_t> said = std::move(error_texts_[&connection]);
      error_texts_.erase(&connection);
      const std::string text(said.begin(), said.end());
      fail(header.id < size() ? static_cast<int64_t>(header.id) : -1,
           text.find("(told by rank") == std::string::npos ? text + " (told by rank " + std::to_string(peer) + ")"
                                                           : text,
           header.seq);
      return;
    }
    case FrameType::kBye:
      peers_[peer].said_bye = true;
      return;
    case FrameType::kProbe: {
      collectives_.compare(peer, header.seq, header.call);
      if (!failure_.empty()) return;
      if (!connection.may_answer()) return;  // it asks, and does not read
      FrameHeader answer;
      answer.type = FrameType::kStatus;
      answer.seq = collectives_.last_posted();
      answer.call = collectives_.last_call();
      connection.enqueue_urgent(answer);
      mark(connection);
      return flush_marked();
    }
    case FrameType::kStatus:
      if (inquiry_ != nullptr) {
        inquiry_->answers[peer] = static_cast<int64_t>(header.seq);
        inquiry_->calls[peer] = header.call;
      }
      return;
    default:
      break;
  }
  if (header.type == FrameType::kArrived || header.type == FrameType::kDecided) {
    decisions_.on_frame(connection, header);
  } else if (connection.lane() == Lane::kTeams || header.type == FrameType::kGivenUp) {
    teams_.on_frame(connection, header, bytes);
  } else if (connection.lane() == Lane::kCollective) {
    collectives_.on_frame(connection, header, bytes);
  } else {
    mailbox_.on_frame(connection, header);
  }
  flush_marked();
}

void Group::on_sent(Connection& connection, const OutFrame& frame) {
  if (connection.lane() == Lane::kCollective) {
    collectives_.on_sent(connection, frame);
  } else if (connection.lane() == Lane::kTeams) {
    teams_.on_sent(connection, frame);
  } else {
    mailbox_.on_sent(connection, frame);
  }
}

void Group::on_room(Connection& connection) {
  if (connection.lane() == Lane::kCollective) {
    collectives_.on_room(connection);
  } else if (connection.lane() == Lane::kTeams) {
    teams_.on_room(connection);
  } else {
    mailbox_.on_room(connection);
  }
}

void Group::on_broken(Connection& connection, const std::string& reason) {
  const uint32_t peer = connection.peer();
  LaneState& state = peers_[peer].lanes[index(connection.lane())];
  std::erase(marked_, &connection);
  error_texts_.erase(&connection);
  if (state.connection.get() == &connection) engine_.poller().bury(std::move(state.connection));
  lose(peer, peers_[peer].said_bye ? "has left the group" : reason);
  collectives_.forget(connection);
  teams_.forget(connection);
  mailbox_.forget(connection);
  decisions_.forget(connection);
}

// A peer ends its connections one by one, and what it said before on another one may still be on its way: only what
// needs a connection that has ended is lost with it.
void Group::lose(uint32_t peer, const std::string& reason) {
  if (peers_[peer].ending.empty()) peers_[peer].ending = reason;
  if (!failure_.empty() || left_) return;
  if (gone(peer, Lane::kTeams)) teams_.lose(peer);
  if (gone(peer, Lane::kCollective)) collectives_.lose(peer);
  if (!failure_.empty()) return;
  if (inquiry_ != nullptr) return;  // conclude() knows more
  const bool needed = (gone(peer, Lane::kCollective) && needs(peer, Lane::kCollective)) ||
                      (gone(peer, Lane::kMessages) && needs(peer, Lane::kMessages));
  if (needed) return fail(peer, who(peer) + " " + peers_[peer].ending);
  // The end of a connection that is not read is not seen: it may lie behind more than the kernel holds.
  for (LaneState& lane : peers_[peer].lanes) {
    if (lane.connection != nullptr && failure_.empty()) lane.connection->drain();
  }
}

void Group::suspect(uint32_t peer, Lane lane, const std::string& reason) {
  suspicions_.push_back({peer, lane, reason, Clock::now() + kSuspicionTime});
  engine_.due_by(suspicions_.back().until);
}

// A rank that has failed because another died leaves, and then lets nobody in. Who knows of that death names it as
// well.
Clock::time_point Group::judge(Clock::time_point now) {
  if (suspicions_.empty()) return Clock::time_point::max();
  if (suspicions_.front().until > now) return suspicions_.front().until;
  if (!std::exchange(suspicions_.front().ripe, true)) return now;  // first what has arrived meanwhile
  const Suspicion suspicion = std::move(suspicions_.front());
  suspicions_.erase(suspicions_.begin());
  if (opening(suspicion.peer, suspicion.lane) != Opening::kInitiated) return now;  // it came to us
  set_opening(suspicion.peer, suspicion.lane, Opening::kNone);
  std::string reason = suspicion.reason;
  for (uint32_t peer = 0; peer < size(); ++peer) {
    if (peer == suspicion.peer || peers_[peer].ending.empty() || peers_[peer].said_bye) continue;
    reason += "; before, " + who(peer) + " " + peers_[peer].ending;
  }
  lose(suspicion.peer, reason);
  return now;
}

// Nothing here may leave the rest undone: it is also the way out when memory has run out.
void Group::fail(int64_t culprit, std::string reason, uint64_t disputed) noexcept {
  if (!failure_.empty()) return;
  failure_ = std::move(reason);
  culprit_ = culprit;
  if (disputed > 0) disputed_ = disputed;
  attempt([this] { log(LogLevel::kInfo, "rank " + std::to_string(rank()) + ": " + failure_); });
  // Peers first: by the time the caller sees the error, they are on their way to know.
  say_last([this](Connection& connection) { tell_failure(connection); });
  end_everything();
}

void Group::on_exception(const char* what) noexcept {
  if (!failure_.empty()) return;
  if (attempt([&] { fail(rank(), who(rank()) + " cannot go on: " + what); })) return;
  fail(rank(), "out of memory");  // which a string has room for without asking for any
}

// To all peers that can be told; where that cannot be done, the end of the connection tells them.
template <typename Words>
void Group::say_last(const Words& words) noexcept {
  for (Peer& peer : peers_) {
    for (LaneState& lane : peer.lanes) {
      if (lane.connection == nullptr) continue;
      if (attempt([&] { words(*lane.connection); })) continue;
      if (lane.connection != nullptr) engine_.poller().bury(std::move(lane.connection));
    }
  }
}

void Group::end_everything() noexcept {
  marked_.clear();
  suspicions_.clear();
  inquiry_.reset();
  collectives_.fail();
  teams_.fail();
  decisions_.fail();
  mailbox_.fail();
}

OutFrame Group::failure_frame() const {
  OutFrame frame;
  frame.header.type = FrameType::kError;
  frame.header.id = culprit_ < 0 ? UINT32_MAX : static_cast<uint32_t>(culprit_);
  frame.header.seq = disputed_ == kUndisputed ? 0 : disputed_.load();
  const size_t length = std::min<size_t>(failure_.size(), kMaxErrorBytes);
  frame.owned.assign(failure_.begin(), failure_.begin() + static_cast<std::ptrdiff_t>(length));
  frame.header.length = length;
  return frame;
}

// Its last words on this connection.
void Group::tell_failure(Connection& connection) {
  connection.enqueue(failure_frame());
  connection.finish();
}

void Group::leave() noexcept {
  if (left_) return;
  left_ = true;
  OutFrame last;
  last.header.type = FrameType::kBye;
  if (!failure_.empty()) attempt([&] { last = failure_frame(); });
  if (failure_.empty()) {
    if (!attempt(
            [this] { failure_ = "the group was destroyed by this rank (destroy_process_group) before it finished"; })) {
      failure_ = "destroyed";
    }
    say_last([](Connection& connection) {
      FrameHeader header;
      header.type = FrameType::kBye;
      connection.enqueue_control(header);
      connection.finish();
    });
  }
  engine_.introductions().forget(*this, last);
  end_everything();
}

bool Group::work() {
  const bool worked = collectives_.work();
  return teams_.work() || worked;
}

void Group::cut(uint32_t peer, Lane lane) noexcept {
  std::unique_ptr<Connection>& connection = peers_[peer].lanes[index(lane)].connection;
  if (connection == nullptr) return;
  std::erase(marked_, connection.get());
  engine_.poller().bury(std::move(connection));
}

bool Group::busy() const {
  if (computes() || !mailbox_.idle()) return true;
  for (const Peer& peer : peers_) {
    for (const LaneState& lane : peer.lanes) {
      if (lane.connection != nullptr && !lane.connection->idle()) return true;
    }
  }
  return false;
}

bool Group::closed() const {
  for (const Peer& peer : peers_) {
    for (const LaneState& lane : peer.lanes) {
      if (lane.connection != nullptr) return false;
    }
  }
  return true;
}

void Group::close() {
  if (packet_watcher_ != nullptr) {
    engine_.poller().remove(mover_->multicast().event_fd());
    engine_.poller().bury(std::move(packet_watcher_));
  }
  for (Peer& peer : peers_) {
    for (LaneState& lane : peer.lanes) {
      if (lane.connection != nullptr) engine_.poller().bury(std::move(lane.connection));
    }
  }
}

Clock::time_point Group::tick(Clock::time_point now) {
  Clock::time_point next = Clock::time_point::max();
  if (!failure_.empty()) return next;
  look_for_life(now);
  if (!failure_.empty()) return next;
  next = judge(now);
  if (!failure_.empty()) return next;
  if (inquiry_ != nullptr) {
    const std::shared_ptr<Operation> asked = collectives_.find(inquiry_->seq);
    const bool finished = asked == nullptr || asked->in_epilogue;
    const bool answered = std::count(inquiry_->answers.begin(), inquiry_->answers.end(), -1) == 0;
    if (finished) {
      inquiry_.reset();  // just in time; but who was lost meanwhile may be needed by others
      for (uint32_t peer = 0; peer < size() && failure_.empty(); ++peer) {
        if (!peers_[peer].ending.empty()) lose(peer, "");
      }
      if (!failure_.empty()) return next;
    } else if (answered || now >= inquiry_->until) {
      conclude();
      return next;
    } else {
      return std::min(next, inquiry_->until);
    }
  }
  const std::shared_ptr<Operation> waiting = collectives_.earliest(&Operation::ask_at);
  if (waiting != nullptr && waiting->ask_at <= now) {
    ask_around(*waiting, now);
    if (!failure_.empty()) return next;
  }
  if (waiting != nullptr) next = std::min(next, waiting->ask_at);
  const std::shared_ptr<Operation> operation = collectives_.earliest(&Operation::deadline);
  if (operation != nullptr && operation->deadline <= now) {
    inquire(*operation, now);
    return std::min(next, now + kInquiryTime);
  }
  if (operation != nullptr) next = std::min(next, operation->deadline);
  next = std::min({next, decisions_.tick(now), collectives_.tick(now), teams_.tick(now)});
  if (!failure_.empty()) return next;
  const std::shared_ptr<Message> message = mailbox_.earliest();
  if (message != nullptr && message->deadline <= now) {
    mailbox_.expire(message);
    return now;
  }
  if (message != nullptr) next = std::min(next, message->deadline);
  return next;
}

void Group::look_for_life(Clock::time_point now) {
  for (Peer& peer : peers_) {
    for (LaneState& lane : peer.lanes) {
      if (lane.connection != nullptr) lane.connection->look_for_life(engine_.host_timeout(), now);
      if (!failure_.empty()) return;
    }
  }
}

// Says what we have called, and asks what the peer has. While the connection is being opened, attach() does it.
void Group::probe(uint32_t peer, const Operation& operation) {
  Connection* open = connection(peer, Lane::kMessages);
  if (open == nullptr) return;
  FrameHeader header;
  header.type = FrameType::kProbe;
  header.seq = operation.seq;
  header.call = operation.call;
  open->enqueue_urgent(header);
  mark(*open);
}

// Two ranks in different collectives may both wait for the other: whoever waits long tells those it waits for what it
// has called, and they compare. Ever more rarely, since a late rank is no mistake.
void Group::ask_around(Operation& operation, Clock::time_point now) {
  operation.ask_at = now + 2 * (now - operation.posted_at);
  for (const uint32_t peer : collectives_.waits_for(operation)) {
    probe(peer, operation);
    if (!failure_.empty()) return;
  }
  flush_marked();
}

// Asks every rank whether it is there and what it has called, so that the error can name the one to look at.
void Group::inquire(const Operation& operation, Clock::time_point now) {
  inquiry_ = std::make_unique<Inquiry>();
  inquiry_->seq = operation.seq;
  inquiry_->until = now + kInquiryTime;
  inquiry_->answers.assign(size(), -1);
  inquiry_->calls.resize(size());
  inquiry_->answers[rank()] = static_cast<int64_t>(collectives_.last_posted());
  for (uint32_t peer = 0; peer < size(); ++peer) {
    if (peer != rank()) probe(peer, operation);
  }
  flush_marked();
}

void Group::conclude() {
  const std::unique_ptr<Inquiry> inquiry = std::move(inquiry_);
  const std::shared_ptr<Operation> operation = collectives_.find(inquiry->seq);
  if (operation == nullptr) return;
  std::string blamed;
  int64_t culprit = -1;
  const auto blame = [&](uint32_t peer, const std::string& what) {
    if (culprit < 0) culprit = peer;
    blamed += (blamed.empty() ? "" : "; ") + who(peer) + " " + what;
  };
  for (uint32_t peer = 0; peer < size(); ++peer) {
    if (inquiry->answers[peer] < 0) blame(peer, peers_[peer].ending.empty() ? "does not answer" : peers_[peer].ending);
  }
  for (uint32_t peer = 0; peer < size(); ++peer) {
    const int64_t posted = inquiry->answers[peer];
    if (posted < 0 || posted >= static_cast<int64_t>(inquiry->seq)) continue;
    blame(peer, "has not called it" + (posted == 0 ? std::string()
                                                   : "; its last call was " + inquiry->calls[peer].text() + " #" +
                                                         std::to_string(posted)));
  }
  if (blamed.empty()) {
    for (const uint32_t peer : collectives_.waits_for(*operation)) {
      blame(peer,
            "has called it, but is slow or cannot be reached; rank " + std::to_string(rank()) + " is waiting for it");
    }
  }
  fail(culprit, "Timed out after " + in_seconds(operation->timeout) + ": " + blamed);
}

}  // namespace paceline
