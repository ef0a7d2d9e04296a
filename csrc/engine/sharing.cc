// Connections to ranks of the same host: memory that both share, and a socket that only rings.
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "engine/connection.h"

namespace paceline {

bool Connection::ready() const {
  const bool news = reads_stream_ && (!paused_ || finishing_) && stream_->readable();
  return news || interrupted_ || (ring_full_ && rings_->made_room()) || (stream_full_ && stream_->made_room());
}

void Connection::on_ready() {
  go_on_ = go_on_ || ring_full_ || stream_full_ || interrupted_;
  if (reads_stream_) read_on();
  settle();
}

// The peer looks at what was written, or at the room that was made. When its socket is full it will, anyway.
void Connection::ring() {
  const uint8_t byte = 0;
  ::send(fd_.get(), &byte, sizeof(byte), MSG_NOSIGNAL | MSG_DONTWAIT);
}

// The peer has rung, or is at its end.
void Connection::hear_ringing() {
  std::array<uint8_t, 64> bytes;
  const ssize_t got = ::recv(fd_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
  go_on_ = go_on_ || got > 0;
  if (ended_ || (got < 0 && (errno == EAGAIN || errno == EINTR))) return;
  ended_ = got <= 0;
  if (ended_) stream_->end();
}

// The payload of the frame lies in the peer's ring.
void Connection::take_shared() {
  const FrameHeader header = header_;  // what the frame leads to may read on
  const uint8_t* bytes = rings_->take(header.length);
  const bool copied = to_ != nullptr;
  if (copied) std::memcpy(to_, bytes, header.length);
  handler_.on_frame(*this, header, copied ? nullptr : bytes);
  rings_->release();
}

// Frames about the rings themselves. False when they make no sense.
bool Connection::control_rings(const FrameHeader& header) {
  if (header.type == FrameType::kRings) {
    const Fd passed = std::move(passed_);
    if (rings_ == nullptr || !passed || !rings_->open(passed)) return false;
    if (lane_ == Lane::kCollective && pulls_->find(header.offset, header.seq)) {
      FrameHeader readable;
      readable.type = FrameType::kReadable;
      enqueue_control(readable);
    }
    stream_.emplace(rings_->stream());
    poller_.add_memory(this);
    if (header.id == 1) {
      FrameHeader stream;
      stream.type = FrameType::kStream;
      enqueue_control(stream);
    }
    go_on_ = true;
    return true;
  }
  if (header.type == FrameType::kStream) {
    if (!stream_ || reads_stream_) return false;
    reads_stream_ = true;
    ahead_begin_ = ahead_end_ = 0;  // what follows on the socket only rings
    drained_ = false;               // and there may be something in the stream, or room
    go_on_ = true;
    return true;
  }
  if (header.type == FrameType::kReadable) {
    lends_ = rings_ != nullptr;
    return lends_;
  }
  go_on_ = true;  // there is room
  return rings_ != nullptr;
}

}  // namespace paceline
