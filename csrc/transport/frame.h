// Frames: what travels on an established connection. A header of fixed size, then `length` bytes of payload.
//
//   type      who to whom                   payload       meaning of the fields
//   data      sender -> receiver            the bytes     [offset, offset+length) of transfer `id` of collective `seq`
//   posted    any -> any                    none          the sender has called collectives up to `seq`, or what of a
//                                                         team has this number
//   message   sender -> receiver            the bytes     point-to-point: [offset, offset+length) of message number
//                                                         `seq`, which has `total` bytes; `id` is its tag
//   offer     sender -> receiver            none          a message of `length` bytes waits to be accepted
//   accept    receiver -> sender            none          send message `seq`
//   credit    receiver -> sender            none          messages that cost `length` are not kept any more
//   probe     any -> any                    none          are you alive, and have you called `seq`?
//   status    answer to probe               none          `seq` = highest collective called; `call` = that call
//   error     any -> all                    text          the group has failed; `id` is the rank to blame, `seq` the
//                                                         collective that ranks disagree about, or 0
//   bye       any -> all                    none          an orderly end
//   given up  any -> its team               text          the operation `seq` of a team has failed; `id` as of error.
//                                                         By any connection
//   arrived   any -> coordinator            none          the sender has called `seq`, its decision number `offset`
//   decided   coordinator -> all            the choice    decisions number `offset` to `seq` are this choice
//
// Of a transfer that goes to many at once by multicast (engine/spreads.h), `id` is the number of its spread in the
// schedule, `total` its bytes, and ranges are pairs of numbers, offset and bytes:
//
//   armed     receiver -> sender            none          packets of this transfer are placed from now on
//   cast      sender -> receivers           none          all its packets have been sent, for the `offset`-th time
//   lacks     receiver -> sender            ranges        what is missing after the `offset`-th time: send it to all
//                                                         again; no ranges: this receiver gets the rest by `want`
//   have      receiver -> sender            none          all bytes are there
//   want      receiver -> receiver, sender  ranges        send these by this connection
//   repair    answer to want                the bytes     [offset, offset+length)
//   over      answer to want                none          this receiver's part has ended: ask the sender
//
// No frame has more than kMaxPayloadBytes of payload, so whatever is urgent waits for one such slice at most.
//
// On one host payload may be `shared`: then it does not follow, but lies in the sender's ring (transport/rings.h).
//
//   rings     any -> any                    none          the sender's segment comes with this frame; `id` is 1 if it
//                                                         reads streams in memory
//   stream    any -> any                    none          the last frame by the socket: all others come through memory
//                                                         (transport/stream.h), and a byte by the socket says: look
//   room      receiver -> sender            none          payload was consumed (a byte by the socket where there is
//                                                         a stream in memory)
//
// Or the receiver pulls it from the sender's memory (transport/pulls.h), once it has said that it can:
//
//   rings     any -> any                    none          and a word for the other to read: `seq`, at address `offset`
//   readable  receiver -> sender            none          it could be read: memory may be lent
//   at        sender -> receiver            an address    where the bytes lie, instead of the bytes; fields as of data
//   pulled    receiver -> sender            none          the next `length` bytes lent for transfer `id` were read
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "reduce/reduce.h"

namespace paceline {

enum class FrameType : uint8_t {
  kData = 1,
  kPosted = 2,
  kMessage = 3,
  kOffer = 4,
  kAccept = 5,
  kProbe = 6,
  kStatus = 7,
  kError = 8,
  kBye = 9,
  kArrived = 10,
  kDecided = 11,
  kCredit = 12,
  kRings = 13,
  kRoom = 14,
  kReadable = 15,
  kStream = 16,
  kAt = 17,
  kPulled = 18,
  kGivenUp = 19,
  kArmed = 20,
  kCast = 21,
  kLacks = 22,
  kHave = 23,
  kWant = 24,
  kRepair = 25,
  kOver = 26,
};

constexpr bool is_of_spread(FrameType type) { return type >= FrameType::kArmed && type <= FrameType::kOver; }

// The collectives by number; the names and their meaning are those of paceline.ir.collective.Kind.
enum class Kind : uint8_t {
  kAllReduce = 0,
  kReduceScatter = 1,
  kAllGather = 2,
  kBroadcast = 3,
  kReduce = 4,
  kGather = 5,
  kScatter = 6,
  kAllToAll = 7,
  kBarrier = 8,
};

const char* name(Kind kind);

// What a rank called: the same on all ranks, or it is a mistake that both sides hear of.
struct Call {
  Kind kind = Kind::kBarrier;
  DType dtype = DType::kBytes;
  ReduceOp op = ReduceOp::kSum;
  uint8_t reserved = 0;
  int32_t root = 0;
  uint64_t count = 0;     // elements of the whole buffer; 0 where ranks may differ (all-to-all)
  uint64_t schedule = 0;  // digest of the schedule that runs it

  bool operator==(const Call&) const = default;
  // The same but for the schedule, where one side does not know it yet.
  bool fits(const Call& other) const;
  std::string text() const;  // "allreduce(float32[1000], sum)"
};

struct FrameHeader {
  FrameType type = FrameType::kData;
  uint32_t id = 0;
  uint64_t seq = 0;
  uint64_t offset = 0;
  uint64_t length = 0;  // of the payload, or (offer, credit, at, pulled) of what it is about
  uint64_t total = 0;   // bytes of the whole transfer or message
  bool shared = false;  // the payload lies in the sender's ring
  Call call;

  // Payload that follows the header on the stream.
  uint64_t streamed_bytes() const {
    if (type == FrameType::kAt) return sizeof(uint64_t);
    const bool carries = type == FrameType::kData || type == FrameType::kMessage || type == FrameType::kError ||
                         type == FrameType::kDecided || type == FrameType::kGivenUp || type == FrameType::kLacks ||
                         type == FrameType::kWant || type == FrameType::kRepair;
    return carries && !shared ? length : 0;
  }
};

constexpr size_t kFrameHeaderBytes = 64;
constexpr uint64_t kMaxPayloadBytes = 128 << 10;
constexpr uint64_t kMaxErrorBytes = 1 << 16;
constexpr uint64_t kMaxChoiceBytes = 1 << 12;
constexpr uint64_t kRangeBytes = 16;
constexpr uint64_t kMostRanges = 4096;  // of one frame

void encode(const FrameHeader& header, std::span<uint8_t, kFrameHeaderBytes> out);

// False when the bytes are no frame header: the connection cannot be trusted any more.
bool decode(std::span<const uint8_t, kFrameHeaderBytes> bytes, FrameHeader* header);

}  // namespace paceline
