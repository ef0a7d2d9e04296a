// One established stream to one peer: frames in, frames out. It moves bytes and keeps their order; what a frame means
// is its handler's business.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/fd.h"
#include "engine/poller.h"
#include "transport/frame.h"
#include "transport/handshake.h"
#include "transport/liveness.h"
#include "transport/pulls.h"
#include "transport/transport.h"

namespace paceline {

using Clock = std::chrono::steady_clock;

class Connection;

// A frame on its way out. Payload is borrowed until `on_sent`, or owned.
struct OutFrame {
  FrameHeader header;
  const uint8_t* payload = nullptr;
  std::vector<uint8_t> owned;
  void* owner = nullptr;  // not null: the payload is borrowed, and may go away with its owner

  // Set by the connection.
  std::array<uint8_t, kFrameHeaderBytes> encoded{};
  bool in_ring = false;  // shared payload that is where the peer can read it

  size_t wire_bytes() const { return kFrameHeaderBytes + header.streamed_bytes(); }
  size_t queued_bytes() const { return header.shared ? header.length : header.streamed_bytes(); }
};

class FrameHandler {
 public:
  enum class Verdict { kTake, kPause };

  // A header has arrived. Payload, if any, goes to `*to` (at least header.length bytes); where `in_place(header)`, that
  // may be left empty. kPause: stop reading this connection until `resume`, then ask again.
  virtual Verdict on_header(Connection& connection, const FrameHeader& header, uint8_t** to) = 0;
  // The frame is here; `bytes` is its payload if that was not copied, and cannot be kept.
  virtual void on_frame(Connection& connection, const FrameHeader& header, const uint8_t* bytes) = 0;

  // The frame's last byte is with the kernel.
  virtual void on_sent(Connection& connection, const OutFrame& frame) = 0;

  // There is room: enqueue more frames, if any.
  virtual void on_room(Connection& connection) = 0;

  // What could be written has been.
  virtual void on_flushed() = 0;

  // The stream has ended, or cannot be trusted any more. The connection is not used after this.
  virtual void on_broken(Connection& connection, const std::string& reason) = 0;

  // An exception has ended the work on a frame or an event, which may be half done.
  virtual void on_exception(const char* what) noexcept = 0;

 protected:
  ~FrameHandler() = default;
};

class Connection final : public Watcher {
 public:
  // `rings` is for payload, or nullptr where it goes through the socket.
  Connection(Poller& poller, FrameHandler& handler, const Transport& transport, std::unique_ptr<Rings> rings, Fd fd,
             uint32_t peer, Lane lane);
  ~Connection() override;

  uint32_t peer() const { return peer_; }
  Lane lane() const { return lane_; }
  // Whether payload goes through memory instead of a network.
  bool shares_memory() const { return rings_ != nullptr; }
  // Whether the peer can read this process's memory: then it may be told where payload lies.
  bool lends() const { return lends_; }
  // Whether this frame's payload can be read where it lies, without being copied first.
  static bool in_place(const FrameHeader& header) { return header.shared; }

  // Bytes that must precede all frames (the last message of the handshake).
  void enqueue_raw(std::vector<uint8_t> bytes);
  void enqueue(OutFrame frame);
  void enqueue_control(const FrameHeader& header);
  // Before all payload that is not on its way yet. For frames whose order among payload means nothing.
  void enqueue_urgent(OutFrame frame);
  void enqueue_urgent(const FrameHeader& header);
  bool has_room() const { return out_.size() < kMostFrames && out_bytes_ < most_bytes_; }
  // What is worth a frame of its own: large enough to make calls cheap, small enough to stay in cache between
  // receiving, reducing and sending on, and to let others through on a slow link.
  uint64_t slice_bytes() const { return most_bytes_ < 2 * kMaxPayloadBytes ? kMaxPayloadBytes / 2 : kMaxPayloadBytes; }
  bool idle() const { return out_.empty(); }
  // Whether it takes answers to questions it has been asked: not of a peer that asks on and on, and does not read.
  bool may_answer() const { return out_.size() < kMostUnread; }

  // Copies from memory that the peer has lent. False when it could not, or the peer may have changed it meanwhile: the
  // connection is broken, or its stream will tell why.
  bool pull(uint64_t address, uint8_t* to, uint64_t length);

  // Writes what can be written now, asking the handler for more as long as there is room.
  void flush();
  // The kernel has taken nothing since this moment, though there is something to take; never: it takes what there is.
  Clock::time_point blocked_since() const { return blocked_since_; }
  bool paused() const { return paused_; }
  // The peer is at its end, and what is left of the stream is finite: pausing again would hide why.
  bool hung_up() const { return hung_up_; }
  void resume();
  // Reads to the end, whatever comes.
  void drain();
  // The owner takes its payload back: frames that are not begun go, and what comes of the frame `seq` that is being
  // received goes nowhere.
  void abandon(const void* owner, uint64_t seq);
  // No more frames out after those enqueued; then the stream is half closed, and what still arrives is discarded.
  void finish();
  // Breaks the connection if the peer's host is gone.
  void look_for_life(std::chrono::seconds timeout, Clock::time_point now);

  void on_event(uint32_t events) override;
  void on_exception(const char* what) noexcept override { handler_.on_exception(what); }
  bool ready() const override;
  void on_ready() override;
  void fall_asleep() override { stream_->fall_asleep(); }
  void wake_up() override { stream_->wake_up(); }
  void wake_other() override {
    if (stream_->sleeps_on()) ring();
  }

 private:
  static constexpr size_t kMostFrames = 32;
  static constexpr size_t kMostUnread = 1024;

  void read_on();
  size_t read_some();
  ssize_t receive(std::span<iovec> parts);
  ssize_t send(std::span<iovec> parts);
  void ring();
  void hear_ringing();
  bool parse();
  void take_bytes();
  void take_shared();
  void insert(const std::deque<OutFrame>::iterator& before, OutFrame frame);
  size_t num_begun() const;
  template <typename Condition>
  void take_back(const Condition& condition);
  bool control_rings(const FrameHeader& header);
  void settle();
  size_t write_some();
  void let_go_of_written();
  void full();
  size_t collect(std::span<iovec> parts);
  void watch();
  void broken(const std::string& reason);
  void hear_out(const std::string& reason);
  void discard();

  Poller& poller_;
  FrameHandler& handler_;
  const Transport& transport_;
  Fd fd_;
  uint32_t peer_;
  Lane lane_;
  std::unique_ptr<Rings> rings_;
  std::unique_ptr<Pulls> pulls_;  // there where rings are
  bool lends_ = false;
  std::optional<Stream> stream_;  // there once both know each other's rings
  bool reads_stream_ = false, writes_stream_ = false;

  // In: bytes read ahead, the frame being received, and where its payload goes.
  std::array<uint8_t, 8192> ahead_;
  size_t ahead_begin_ = 0, ahead_end_ = 0;
  bool in_frame_ = false;
  FrameHeader header_;
  uint8_t* to_ = nullptr;
  uint64_t to_go_ = 0;
  std::vector<uint8_t> nowhere_;  // where it goes when it is not wanted any more
  Fd passed_;                     // a file that came with the bytes read last
  bool lost_file_ = false;        // one came, and this process had no descriptor for it
  bool drained_ = false;          // the last read took all there was
  bool paused_ = false;
  bool hung_up_ = false;
  bool ended_ = false;  // the socket's end was seen, and what is left of the stream is in memory

  // Out.
  std::deque<OutFrame> out_;
  std::vector<uint8_t> raw_;
  size_t front_written_ = 0;  // bytes of the front frame, header included
  size_t out_bytes_ = 0;
  size_t most_bytes_ = kMostUnsentBytes;
  Clock::time_point limited_at_ = Clock::time_point::min();
  bool socket_full_ = false;
  Clock::time_point blocked_since_ = Clock::time_point::max();
  bool go_on_ = false;  // the peer has made room, or is to be told something
  bool ring_full_ = false, stream_full_ = false;
  bool interrupted_ = false;  // there is more to write, and room, but others were let in
  bool finishing_ = false;
  bool finished_ = false;
  bool broken_ = false;
  uint32_t watched_ = 0;
  Liveness liveness_;
};

}  // namespace paceline
