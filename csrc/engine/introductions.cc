#include "engine/introductions.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "common/attempt.h"
#include "common/log.h"
#include "common/system_error.h"
#include "engine/engine.h"
#include "engine/group.h"
#include "transport/liveness.h"

namespace paceline {
namespace {

constexpr auto kPatience = std::chrono::seconds(10);
constexpr size_t kMostStrangers = 4096;

// Where nobody is taken in just now, we knock again: soon, then ever more rarely.
constexpr auto kFirstDelay = std::chrono::milliseconds(2);
constexpr auto kLongestDelay = std::chrono::milliseconds(100);

// Out of files: how long a stranger may keep the spare one, and how often we look whether there is one again.
constexpr auto kLastPatience = std::chrono::seconds(1);
constexpr auto kRegaining = std::chrono::milliseconds(20);

Fd open_spare() { return Fd(::open("/dev/null", O_RDONLY | O_CLOEXEC)); }

std::string out_of_files_here(const Group& group) { return group.who(group.rank()) + " has " + kOutOfFiles; }

// A peer on another host that listens on its loopback interface: what to do about it, or nothing.
std::string only_there(const Group& group, uint32_t peer) {
  const std::vector<PeerAddress>& addresses = group.membership().addresses;
  const std::string& address = addresses[peer].tcp;
  const bool loopback = address.rfind("127.", 0) == 0 || address.rfind("[::1]", 0) == 0;
  if (!loopback || addresses[peer].host == addresses[group.rank()].host) return "";
  return "; it listens at " + address +
         ", which no other host can reach: set PACELINE_IFNAME there to the interface of its network";
}

}  // namespace

class Introductions::Door final : public Watcher {
 public:
  Door(Introductions& introductions, Transport& transport) : introductions_(introductions), transport_(transport) {}

  void on_event(uint32_t) override {
    introductions_.regain_spare(Clock::now());  // before a connection takes its place that is not the last one
    for (int i = 0; i < 64; ++i) {
      Fd fd = transport_.accept();
      const bool last = !fd && out_of_files(errno);
      if (last && !introductions_.give_up_spare()) return close();
      if (last) fd = transport_.accept();
      if (!fd) return;
      introductions_.admit(transport_, std::move(fd), last);
    }
  }

  void on_exception(const char* what) noexcept override {
    attempt([&] { log(LogLevel::kWarning, "dropped a connection at " + transport_.address() + ": " + what); });
  }

  // There is a file again for whoever has waited.
  void reopen() {
    if (!closed_) return;
    watch(EPOLLIN);
    closed_ = false;
  }

 private:
  // Not even the spare file is left. Whoever knocks waits: to look again and again would only cost time.
  void close() {
    closed_ = true;
    watch(0);
  }

  void watch(uint32_t events) { introductions_.engine_.poller().change(transport_.listening_fd(), events, this); }

  Introductions& introductions_;
  Transport& transport_;
  bool closed_ = false;
};

class Introductions::Stranger final : public Watcher {
 public:
  enum class State { kConnecting, kHello, kWelcome, kConfirm };

  // Accepted.
  Stranger(Introductions& introductions, Transport& transport, Fd fd, bool last)
      : introductions_(introductions), transport_(transport), fd_(std::move(fd)), state_(State::kHello), last_(last) {
    if (last) deadline_ = Clock::now() + kLastPatience;
    watch(EPOLLIN);
  }

  // Initiated.
  Stranger(Introductions& introductions, Transport& transport, Fd fd, bool last, Group& group, uint32_t peer, Lane lane)
      : introductions_(introductions),
        transport_(transport),
        fd_(std::move(fd)),
        state_(State::kConnecting),
        last_(last),
        group_(&group),
        peer_(peer),
        lane_(lane) {
    // How long to wait for a member is for the operation to say; but it may wait for our spare file, as we for its.
    deadline_ = last ? Clock::now() + kLastPatience : Clock::time_point::max();
    watch(EPOLLOUT);
  }

  ~Stranger() override {
    if (fd_) introductions_.engine_.poller().remove(fd_.get());
  }

  const Group* group() const { return group_ != nullptr ? group_ : claimed_; }
  uint32_t peer() const { return peer_; }
  Lane lane() const { return lane_; }
  bool initiated() const { return state_ == State::kConnecting || state_ == State::kWelcome; }
  Clock::time_point deadline() const { return deadline_; }
  // Of one that we opened: whether the host does not answer.
  bool lost(Clock::time_point now) {
    return initiated() && liveness_.lost(transport_, fd_.get(), introductions_.engine_.host_timeout(), now);
  }

  // Its time is over.
  void expire() {
    if (initiated()) return give_up("cannot be reached: " + out_of_files_here(*group_));
    if (last_ && claimed_ != nullptr) {
      OutFrame frame;
      frame.header.type = FrameType::kError;
      frame.header.id = claimed_->rank();
      const std::string words = out_of_files_here(*claimed_);
      frame.owned.assign(words.begin(), words.end());
      frame.header.length = words.size();
      say(frame);
    }
    give_up("does not answer");
  }

  // To a member whose confirmation was not read yet: for it the connection is open, and its mere end is a death.
  void say(const OutFrame& frame) {
    if (state_ != State::kConfirm) return;
    std::vector<uint8_t> bytes(kFrameHeaderBytes);
    encode(frame.header, std::span<uint8_t, kFrameHeaderBytes>(bytes.data(), kFrameHeaderBytes));
    bytes.insert(bytes.end(), frame.owned.begin(), frame.owned.end());
    send(bytes);
  }

  // The other side is gone or not to be trusted.
  void give_up(const std::string& why) {
    Group* group = group_;
    Group* claimed = claimed_;
    const uint32_t peer = peer_;
    const Lane lane = lane_;
    if (group == nullptr) log(LogLevel::kInfo, "dropped a connection at " + transport_.address() + ": " + why);
    introductions_.drop(*this);
    if (group != nullptr) {
      group->suspect(peer, lane, why + only_there(*group, peer));
    } else if (claimed != nullptr && claimed->opening(peer, lane) == Group::Opening::kAccepting) {
      claimed->set_opening(peer, lane, Group::Opening::kNone);
      claimed->reopen(peer, lane);
    }
  }

  void on_event(uint32_t) override {
    if (state_ == State::kConnecting) return connected();
    const size_t wanted = state_ == State::kHello     ? kHelloBytes
                          : state_ == State::kWelcome ? kWelcomeBytes
                                                      : kConfirmBytes;
    while (got_ < wanted) {
      const ssize_t got = ::read(fd_.get(), bytes_.data() + got_, wanted - got_);
      if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
      if (got == 0) return give_up("closed its connection while being introduced: its process died or left the group");
      if (got < 0) return give_up(std::string("cannot be reached: ") + std::strerror(errno));
      got_ += static_cast<size_t>(got);
    }
    got_ = 0;
    if (state_ == State::kHello) return hello();
    if (state_ == State::kWelcome) return welcome();
    confirm();
  }

  void on_exception(const char* what) noexcept override {
    Group* group = group_ != nullptr ? group_ : claimed_;
    if (attempt([&] { give_up(std::string("cannot be spoken to: ") + what); }) || group == nullptr) return;
    group->on_exception(what);
  }

 private:
  void watch(uint32_t events) { introductions_.engine_.poller().add(fd_.get(), events, this); }

  // Handshake messages are small: a fresh socket takes them whole.
  template <typename Bytes>
  bool send(const Bytes& bytes) {
    return ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
  }

  void connected() {
    int error = 0;
    socklen_t length = sizeof(error);
    ::getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error == ECONNREFUSED) return give_up("refused the connection: its process died");
    if (error != 0) return give_up(std::string("cannot be reached: ") + std::strerror(error));
    Hello message;
    message.lane = lane_;
    message.group = group_->membership().id;
    message.epoch = group_->membership().epoch;
    message.from_rank = group_->rank();
    message.to_rank = peer_;
    message.nonce = random_nonce();
    hello_ = encode(message, group_->membership().secret);
    if (!send(hello_)) return give_up("closed its connection while being introduced");
    state_ = State::kWelcome;
    introductions_.engine_.poller().change(fd_.get(), EPOLLIN, this);
  }

  void hello() {
    Hello message;
    std::memcpy(hello_.data(), bytes_.data(), kHelloBytes);
    if (!decode(std::span<const uint8_t, kHelloBytes>(hello_), &message))
      return give_up("it does not speak our protocol");
    if (message.version != kProtocolVersion) {
      return give_up("it speaks version " + std::to_string(message.version) + " of the protocol, not " +
                     std::to_string(kProtocolVersion));
    }
    Group* group = introductions_.engine_.find(message.group, message.to_rank);
    if (group == nullptr || message.epoch != group->membership().epoch || message.from_rank >= group->size() ||
        message.from_rank == group->rank()) {
      return give_up("it asked for a group that is not here");
    }
    if (!proven(hello_, group->membership().secret)) return give_up("it does not know the group's secret");
    if (!group->greet(message.nonce)) return give_up("it repeats what a member has said");
    nonce_ = random_nonce();
    const Group::Opening opening = group->opening(message.from_rank, message.lane);
    Welcome answer;
    answer.nonce = nonce_;
    answer.accepted = opening == Group::Opening::kNone || opening == Group::Opening::kRefused ||
                      (opening == Group::Opening::kInitiated && message.from_rank < group->rank());
    answer.proof = prove_acceptor(group->membership().secret, hello_, nonce_, answer.accepted);
    if (!send(encode(answer))) return give_up("closed its connection while being introduced");
    if (!answer.accepted) return give_up("both sides had opened one");
    peer_ = message.from_rank;
    lane_ = message.lane;
    claimed_ = group;
    state_ = State::kConfirm;
    introductions_.cancel(*group, peer_, lane_);
    group->set_opening(peer_, lane_, Group::Opening::kAccepting);
  }

  void welcome() {
    Welcome answer;
    if (!decode(std::span<const uint8_t, kWelcomeBytes>(bytes_.data(), kWelcomeBytes), &answer)) {
      return give_up("answered with bytes that are no handshake");
    }
    if (!equal_in_constant_time(answer.proof,
                                prove_acceptor(group_->membership().secret, hello_, answer.nonce, answer.accepted))) {
      return give_up("does not know the group's secret: another job listens at its address");
    }
    if (!answer.accepted) {  // theirs stays; it is on its way
      group_->set_opening(peer_, lane_, Group::Opening::kRefused);
      return introductions_.drop(*this);
    }
    const Digest proof = prove_initiator(group_->membership().secret, hello_, answer.nonce);
    open(group_, std::vector<uint8_t>(proof.begin(), proof.end()));
  }

  void confirm() {
    Digest proof;
    std::memcpy(proof.data(), bytes_.data(), proof.size());
    if (!equal_in_constant_time(proof, prove_initiator(claimed_->membership().secret, hello_, nonce_))) {
      return give_up("it does not know the group's secret");
    }
    open(claimed_, {});
  }

  void open(Group* group, std::vector<uint8_t> last_words) {
    Engine& engine = introductions_.engine_;
    bool last = last_;
    std::unique_ptr<Rings> rings;
    try {
      if (!last) rings = transport_.create_rings();
    } catch (const std::system_error& error) {
      last = out_of_files(error.code().value());
      if (!last) throw;
    }
    engine.poller().remove(fd_.get());
    auto connection = std::make_unique<Connection>(engine.poller(), *group, transport_, std::move(rings),
                                                   std::move(fd_), peer_, lane_);
    if (!last_words.empty()) connection->enqueue_raw(std::move(last_words));
    introductions_.drop(*this);
    group->guarded([&] {
      group->attach(std::move(connection));
      if (last) group->fail(group->rank(), out_of_files_here(*group));
    });
  }

  Introductions& introductions_;
  Transport& transport_;
  Fd fd_;
  State state_;
  bool last_;  // in the place of the spare file: the peer is told that no more are left, and that is all
  Clock::time_point deadline_ = Clock::now() + kPatience;
  Group* group_ = nullptr;    // of one that we opened
  Group* claimed_ = nullptr;  // what one that we accepted says it is for
  uint32_t peer_ = 0;
  Lane lane_ = Lane::kCollective;
  HelloBytes hello_{};
  Nonce nonce_{};
  std::array<uint8_t, kHelloBytes> bytes_{};  // the longest of the messages
  size_t got_ = 0;
  Liveness liveness_;
};

Introductions::Introductions(Engine& engine) : engine_(engine), spare_(open_spare()) {}

Introductions::~Introductions() = default;

void Introductions::listen(Transport& transport) {
  doors_.push_back(std::make_unique<Door>(*this, transport));
  engine_.poller().add(transport.listening_fd(), EPOLLIN, doors_.back().get());
}

bool Introductions::give_up_spare() {
  if (!spare_) return false;
  log(LogLevel::kWarning, std::string("no more connections: ") + kOutOfFiles);
  spare_.reset();
  engine_.due_by(Clock::now() + kRegaining);
  return true;
}

// Returns when to try again.
Clock::time_point Introductions::regain_spare(Clock::time_point now) {
  if (!spare_) spare_ = open_spare();
  if (!spare_) return now + kRegaining;
  const bool open = attempt([this] {
    for (const auto& door : doors_) door->reopen();
  });
  return open ? Clock::time_point::max() : now + kRegaining;
}

Fd Introductions::connect(Transport& transport, const std::string& address, bool* last) {
  regain_spare(Clock::now());
  try {
    return transport.connect(address);
  } catch (const std::system_error& error) {
    if (!out_of_files(error.code().value()) || !give_up_spare()) throw;
  }
  *last = true;
  return transport.connect(address);
}

void Introductions::admit(Transport& transport, Fd fd, bool last) {
  if (strangers_.size() >= kMostStrangers) {  // the oldest one that only listens has had its time
    const auto oldest =
        std::find_if(strangers_.begin(), strangers_.end(), [](const auto& stranger) { return !stranger->initiated(); });
    if (oldest == strangers_.end()) return;
    (*oldest)->give_up("too many were waiting");
  }
  add(transport, std::move(fd), last);
}

// A place in the list first: whoever is watched already must not end in another way than by `drop`.
template <typename... Arguments>
void Introductions::add(Transport& transport, Fd fd, Arguments&&... arguments) {
  strangers_.emplace_back();
  try {
    strangers_.back() = std::make_unique<Stranger>(*this, transport, std::move(fd), arguments...);
  } catch (...) {
    strangers_.pop_back();
    throw;
  }
}

void Introductions::open(Group& group, uint32_t peer, Lane lane) { knock(group, peer, lane, kFirstDelay); }

void Introductions::knock(Group& group, uint32_t peer, Lane lane, std::chrono::milliseconds delay) {
  std::string address;
  Transport* transport = engine_.transport_to(group.membership().addresses[peer], &address);
  group.set_opening(peer, lane, Group::Opening::kInitiated);
  try {
    bool last = false;
    Fd fd = connect(*transport, address, &last);
    add(*transport, std::move(fd), last, group, peer, lane);
  } catch (const std::system_error& error) {
    if (error.code().value() == EAGAIN) {  // a Unix socket whose backlog is full, and does not say when that is over
      retries_.push_back({&group, peer, lane, delay, Clock::now() + delay});
      engine_.due_by(retries_.back().at);
      return;
    }
    const int code = error.code().value();
    group.suspect(peer, lane,
                  code == ECONNREFUSED ? "refused the connection: its process died" + only_there(group, peer)
                  : out_of_files(code) ? "cannot be reached: " + out_of_files_here(group)
                                       : std::string("cannot be reached: ") + error.what() + only_there(group, peer));
  } catch (const std::exception& error) {
    group.suspect(peer, lane, std::string("cannot be reached: ") + error.what());
  }
}

void Introductions::cancel(const Group& group, uint32_t peer, Lane lane) {
  std::erase_if(retries_,
                [&](const Retry& retry) { return retry.group == &group && retry.peer == peer && retry.lane == lane; });
  for (const auto& stranger : strangers_) {
    if (stranger->group() == &group && stranger->peer() == peer && stranger->lane() == lane && stranger->initiated()) {
      return drop(*stranger);
    }
  }
}

void Introductions::forget(const Group& group, const OutFrame& last_words) noexcept {
  std::erase_if(retries_, [&](const Retry& retry) { return retry.group == &group; });
  for (size_t i = strangers_.size(); i-- > 0;) {
    if (strangers_[i]->group() != &group) continue;
    attempt([&] { strangers_[i]->say(last_words); });
    drop(*strangers_[i]);
  }
}

void Introductions::drop(Stranger& stranger) {
  const auto found =
      std::find_if(strangers_.begin(), strangers_.end(), [&](const auto& entry) { return entry.get() == &stranger; });
  if (found == strangers_.end()) return;
  engine_.poller().bury(std::move(*found));
  strangers_.erase(found);
}

Clock::time_point Introductions::tick(Clock::time_point now) {
  for (size_t i = strangers_.size(); i-- > 0;) {
    if (i >= strangers_.size()) continue;
    Stranger& stranger = *strangers_[i];
    const bool lost = stranger.lost(now);
    if (!lost && stranger.deadline() > now) continue;
    const auto end = [&] { lost ? stranger.give_up(lost_host(engine_.host_timeout())) : stranger.expire(); };
    if (!attempt(end)) stranger.on_exception("out of memory");
  }
  for (size_t i = retries_.size(); i-- > 0;) {
    if (i >= retries_.size() || retries_[i].at > now) continue;
    const Retry retry = retries_[i];
    retries_.erase(retries_.begin() + static_cast<std::ptrdiff_t>(i));
    retry.group->guarded(
        [&] { knock(*retry.group, retry.peer, retry.lane, std::min(2 * retry.delay, kLongestDelay)); });
  }
  Clock::time_point next = regain_spare(now);
  for (const Retry& retry : retries_) next = std::min(next, retry.at);
  for (const auto& stranger : strangers_) next = std::min(next, stranger->deadline());
  return next;
}

}  // namespace paceline
