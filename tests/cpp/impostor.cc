#include "impostor.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <array>
#include <cstdlib>
#include <cstring>

#include "common/passing.h"
#include "transport/shm/shm.h"
#include "transport/tcp/tcp.h"

namespace paceline::testing {

Forgery::Forgery() : fd_(::memfd_create("forgery", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
  const Rings model;
  bytes_ = static_cast<size_t>(::lseek(model.fd(), 0, SEEK_END));
  const int seals = ::fcntl(model.fd(), F_GET_SEALS);
  if (::ftruncate(fd_.get(), static_cast<off_t>(bytes_)) != 0) std::abort();
  void* memory = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  if (memory == MAP_FAILED || ::fcntl(fd_.get(), F_ADD_SEALS, seals) != 0) std::abort();
  memory_ = static_cast<uint8_t*>(memory);
}

Forgery::~Forgery() { ::munmap(memory_, bytes_); }

void Forgery::write(size_t where, uint64_t count) { std::memcpy(memory_ + where, &count, sizeof(count)); }

Impostor::Impostor(const Engine& engine, bool shm) {
  transport_ = shm ? shm::create() : tcp::create({"lo"});
  fd_ = transport_->connect(shm ? engine.address().shm : engine.address().tcp);
  pollfd waiting{fd_.get(), POLLOUT, 0};
  ::poll(&waiting, 1, 5000);
  ::fcntl(fd_.get(), F_SETFL, ::fcntl(fd_.get(), F_GETFL) & ~O_NONBLOCK);
  const timeval patience{5, 0};
  ::setsockopt(fd_.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  // An engine may well stop reading, which must not stop the test.
  const timeval impatience{0, 200000};
  ::setsockopt(fd_.get(), SOL_SOCKET, SO_SNDTIMEO, &impatience, sizeof(impatience));
}

bool Impostor::introduce(const Membership& member, uint32_t to, Lane lane, bool confirm) {
  Hello hello;
  hello.lane = lane;
  hello.group = member.id;
  hello.epoch = member.epoch;
  hello.from_rank = member.rank;
  hello.to_rank = to;
  hello.nonce = random_nonce();
  const HelloBytes bytes = encode(hello, member.secret);
  send(bytes);
  WelcomeBytes answer;
  Welcome welcome;
  if (!receive(answer) || !decode(std::span<const uint8_t, kWelcomeBytes>(answer), &welcome) || !welcome.accepted ||
      welcome.proof != prove_acceptor(member.secret, bytes, welcome.nonce, welcome.accepted)) {
    return false;
  }
  if (confirm) send(prove_initiator(member.secret, bytes, welcome.nonce));
  return true;
}

void Impostor::speak_through(const Stream& stream) {
  FrameHeader header;
  header.type = FrameType::kStream;
  send(header);
  stream_.emplace(stream);
}

void Impostor::send(std::span<const uint8_t> bytes) {
  if (stream_) {  // what there is no room for is lost
    const iovec part{const_cast<uint8_t*>(bytes.data()), bytes.size()};
    stream_->write(std::span(&part, 1));
    bytes = std::span(reinterpret_cast<const uint8_t*>("!"), 1);
  }
  while (!bytes.empty()) {
    const ssize_t sent = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent <= 0) return;  // the engine has hung up or reads no more, which is for the test to see
    bytes = bytes.subspan(static_cast<size_t>(sent));
  }
}

void Impostor::send(const FrameHeader& header, std::span<const uint8_t> payload) {
  std::array<uint8_t, kFrameHeaderBytes> bytes;
  encode(header, bytes);
  send(bytes);
  send(payload);
}

void Impostor::share(int fd, const Pulls* pulls) {
  FrameHeader header;
  header.type = FrameType::kRings;
  header.seq = pulls != nullptr ? pulls->word() : 0;
  header.offset = pulls != nullptr ? pulls->address() : 0;
  std::array<uint8_t, kFrameHeaderBytes> bytes;
  encode(header, bytes);
  iovec part{bytes.data(), bytes.size()};
  send_with_file(fd_.get(), std::span(&part, 1), fd, MSG_NOSIGNAL);
}

bool Impostor::receive(std::span<uint8_t> bytes) {
  while (!bytes.empty()) {
    const ssize_t got = ::recv(fd_.get(), bytes.data(), bytes.size(), 0);
    if (got <= 0) return false;
    bytes = bytes.subspan(static_cast<size_t>(got));
  }
  return true;
}

std::optional<FrameHeader> Impostor::receive_frame(std::vector<uint8_t>* payload) {
  for (;;) {
    std::array<uint8_t, kFrameHeaderBytes> bytes;
    FrameHeader header;
    if (!receive(bytes) || !decode(std::span<const uint8_t, kFrameHeaderBytes>(bytes), &header)) return std::nullopt;
    std::vector<uint8_t> rest(header.streamed_bytes());
    if (!receive(rest)) return std::nullopt;
    const bool any_time = header.type == FrameType::kPosted || header.type == FrameType::kProbe ||
                          header.type == FrameType::kRings || header.type == FrameType::kRoom ||
                          header.type == FrameType::kReadable;
    if (any_time) continue;
    if (payload != nullptr) *payload = std::move(rest);
    return header;
  }
}

void Impostor::shut() { ::shutdown(fd_.get(), SHUT_WR); }

void Impostor::reset() {
  const linger now{1, 0};
  ::setsockopt(fd_.get(), SOL_SOCKET, SO_LINGER, &now, sizeof(now));
  fd_.reset();
}

}  // namespace paceline::testing
