// Frames: what travels on an established connection. A header of fixed size, then `length` bytes of payload.
//
//   type      who to whom                   payload       meaning of the fields
//   data      sender -> receiver            the bytes     [offset, offset+length) of transfer `id` of collective `seq`
//   at        sender -> receiver, one host  none          the same bytes lie at `address` of the sender: pull them
//   pulled    receiver -> sender            none          transfer `id` was pulled up to `offset`
//   posted    any -> any                    none          the sender has called collectives up to `seq`
//   message   sender -> receiver            the bytes     point-to-point: `id` is the tag, `seq` the message's number
//   offer     sender -> receiver            none          a message of `length` bytes waits to be accepted
//   accept    receiver -> sender            none          send (tcp) message `seq`
//   probe     any -> any                    none          are you alive, and have you called `seq`?
//   status    answer to probe               none          `seq` = highest collective called; `call` = that call
//   error     any -> all                    text          the group has failed; `id` is the rank to blame
//   bye       any -> all                    none          an orderly end
//   arrived   any -> coordinator            none          the sender has called `seq`, its decision number `offset`
//   decided   coordinator -> all            the choice    decisions number `offset` to `seq` are this choice
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "reduce/reduce.h"

namespace paceline {

enum class FrameType : uint8_t {
  kData = 1,
  kAt = 2,
  kPulled = 3,
  kPosted = 4,
  kMessage = 5,
  kOffer = 6,
  kAccept = 7,
  kProbe = 8,
  kStatus = 9,
  kError = 10,
  kBye = 11,
  kArrived = 12,
  kDecided = 13,
};

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
  uint64_t length = 0;   // of the payload that follows, or (at, offer) that is offered
  uint64_t total = 0;    // bytes of the whole transfer
  uint64_t address = 0;  // at, offer: where the bytes lie in the sender's memory
  Call call;

  // Whether payload follows the header on the stream.
  bool has_payload() const {
    return type == FrameType::kData || type == FrameType::kMessage || type == FrameType::kError ||
           type == FrameType::kDecided;
  }
};

constexpr size_t kFrameHeaderBytes = 72;
constexpr uint64_t kMaxErrorBytes = 1 << 16;
constexpr uint64_t kMaxChoiceBytes = 1 << 12;

void encode(const FrameHeader& header, std::span<uint8_t, kFrameHeaderBytes> out);

// False when the bytes are no frame header: the connection cannot be trusted any more.
bool decode(std::span<const uint8_t, kFrameHeaderBytes> bytes, FrameHeader* header);

}  // namespace paceline
