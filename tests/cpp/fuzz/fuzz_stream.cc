// A member of a group of two that says anything at all while the other has a collective, a send and a receive in
// flight, or a collective that awaits a decision, or a transfer to many by multicast, or an operation of a team. Frames
// are made to fit, except for the fields that the input changes, so that they get far into the engine. Whatever
// happens, all three end soon after the stream does, and no byte outside their buffers is touched.
#include <chrono>
#include <cstring>
#include <memory>
#include <vector>

#include "engine/engine.h"
#include "impostor.h"
#include "input.h"
#include "ranks.h"

using namespace paceline;

namespace {

// One frame: its type, which fields are not what they should be, those fields, and how much payload comes.
void say(testing::Impostor& impostor, const Rings& rings, testing::Input& input, const Call& call, uint64_t bytes,
         uint64_t first, uint64_t* moved) {
  static const std::vector<uint8_t> memory(1 << 18);
  FrameHeader header;
  const uint8_t type = input.byte();
  if (type >= 0xf0) return impostor.send(input.take(input.byte()));  // no frame at all
  header.type = type >= 0xd8   ? FrameType::kGivenUp
                : type >= 0xa8 ? static_cast<FrameType>(20 + type % 7)
                               : static_cast<FrameType>(1 + type % 18);
  const uint8_t changed = input.byte();
  const bool of_spread = is_of_spread(header.type);
  const bool collective = header.type <= FrameType::kPosted || of_spread;
  const bool decides = header.type == FrameType::kArrived || header.type == FrameType::kDecided;
  header.seq = collective || header.type >= FrameType::kProbe ? first + 1 : 0;
  header.call = call;
  header.total = bytes;
  header.offset = *moved;
  const bool says_why = header.type == FrameType::kError || header.type == FrameType::kGivenUp;
  header.length = says_why ? 5 : header.type == FrameType::kDecided ? 1 : bytes - *moved;
  if (decides) header.offset = 1;
  if (of_spread) {  // of the first or the second spread; by turns of rounds
    header.id = changed >> 7;
    header.offset = header.type == FrameType::kRepair ? 0 : 1;
    header.length = header.type == FrameType::kRepair ? std::min<uint64_t>(bytes, 1000) : 0;
    const bool lists = header.type == FrameType::kWant || header.type == FrameType::kLacks;
    if (lists && type % 2 == 0) header.length = kRangeBytes;
  }
  if ((changed & 1) != 0) header.id = static_cast<uint32_t>(input.number(4));
  if ((changed & 2) != 0) header.seq = first + input.number(2);
  if ((changed & 4) != 0) header.offset = input.number(4);
  if ((changed & 8) != 0) header.length = input.number(4);
  if ((changed & 16) != 0) header.total = input.number(4);
  header.shared = (changed & 32) != 0;
  if ((changed & 64) != 0) header.call.count = input.number(2);
  std::vector<uint8_t> payload;
  if (header.type == FrameType::kAt) {  // of memory that is there, unless the input has it elsewhere
    const uint64_t address = reinterpret_cast<uint64_t>(memory.data()) + ((changed & 128) != 0 ? input.number(4) : 0);
    payload.resize(sizeof(address));
    std::memcpy(payload.data(), &address, sizeof(address));
  } else if (of_spread && header.length == kRangeBytes) {
    payload.resize(kRangeBytes);
    payload[1] = input.byte();
    payload[9] = input.byte();
  } else if (header.streamed_bytes() > 0) {
    const uint64_t whole = std::min<uint64_t>(header.length, 1 << 18);
    payload.resize((changed & 128) != 0 ? std::min<uint64_t>(input.number(3), whole) : whole, 0x55);
  }
  if (header.type == FrameType::kRings && (changed & 1) == 0) return impostor.share(rings.fd());
  if (header.type == FrameType::kData || header.type == FrameType::kAt)
    *moved = std::min(bytes, *moved + header.length);
  impostor.send(header, payload);
}

struct Buffers {
  std::vector<uint8_t> collective, out, in;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Engine engine({"lo", true, true});
  testing::Input input(data, size);
  const uint8_t choices = input.byte();
  const bool shm = (choices & 1) != 0;
  const uint64_t bytes = (choices & 2) != 0 ? 4000 : 200000;
  Membership member = testing::membership(0, 2);
  const std::shared_ptr<Group> group = engine.join(member);
  engine.introduce(group, {engine.address(), {"impostor", "127.0.0.1:1", ""}});
  member.rank = 1;
  auto buffers = std::make_unique<Buffers>();
  buffers->collective.resize(bytes);
  buffers->out.resize(bytes);
  buffers->in.resize(bytes);

  auto operation = std::make_shared<Operation>();
  operation->call = {Kind::kAllReduce, DType::kFloat32, ReduceOp::kSum, 0, 0, bytes / 4, 0};
  operation->program = ((choices & 4) != 0 ? testing::ring_all_reduce(2) : testing::swap_all_reduce()).program(0, 2);
  uint8_t nothing = 0;
  operation->places =
      testing::cut(buffers->collective.data(), bytes / 4, 4, operation->program->num_chunks(), &nothing);
  operation->timeout = std::chrono::seconds(20);
  std::vector<testing::Pending> pending;
  const auto watch = [&pending] {
    const auto promise = std::make_shared<std::promise<std::string>>();
    pending.emplace_back(promise->get_future());
    return [promise](const std::string& error) { promise->set_value(error); };
  };
  const auto message = [&](std::vector<uint8_t>& buffer) {
    const auto message = std::make_shared<Message>();
    message->peer = 1;
    message->data = buffer.data();
    message->bytes = buffer.size();
    message->timeout = std::chrono::seconds(20);
    message->on_done = watch();
    return message;
  };
  const bool messages = (choices & 8) != 0;
  const bool awaits = messages && (choices & 32) != 0;  // decisions are told where messages are
  if (awaits) {
    Decisions::Rules rules;
    rules.enabled = true;
    rules.least_patience = std::chrono::milliseconds((choices & 64) != 0 ? 1 : 10000);
    rules.most_missing = 1;
    engine.decide_by(group, rules);
  }
  const bool team = !messages && (choices & 32) != 0;
  const bool spreads = !messages && !team && (choices & 64) != 0;
  if (spreads) {
    testing::Schedule schedule{"spreads", 2, {}};
    schedule.spreads = {{0, 0, 0}, {1, 1, 1}};
    operation->call.kind = Kind::kAllGather;
    operation->program = schedule.program(0, 2);
    operation->places = testing::cut(buffers->collective.data(), bytes / 4, 4, 2, &nothing);
    MulticastSettings settings;
    settings.group = "239.192.7.3";
    settings.port = 41998;
    settings.interface_address = "127.0.0.1";
    settings.num_ranks = 2;
    settings.group_id = member.id;
    settings.secret = member.secret;
    engine.spread_by(group, Multicast::create(settings), {1'000'000'000, 1'000'000'000});
  }
  const uint64_t first = team ? kFirstOfTeams : 0;
  if (team) operation->number = first + 1;
  const auto post = [&] {
    if (messages) {
      engine.send(group, message(buffers->out));
      engine.receive(group, message(buffers->in));
    }
    if (awaits) {
      operation->prepare = [ready = Prepared{operation->program, operation->places}](const std::string&, bool) {
        return std::optional(ready);
      };
      operation->program = nullptr;
      operation->places.clear();
    }
    if (awaits || !messages) {
      operation->on_done = watch();
      engine.post(group, operation, true);
    }
  };
  {
    testing::Impostor impostor(engine, shm);
    Rings rings;
    const Rings unread;
    testing::require(rings.open(Fd(::dup(unread.fd()))), "a segment that cannot be mapped");
    testing::require(impostor.introduce(member, 0,
                                        messages ? Lane::kMessages
                                        : team   ? Lane::kTeams
                                                 : Lane::kCollective),
                     "a member that is not welcome");
    Call call = operation->call;
    call.schedule = awaits ? 0 : operation->program->digest();
    if (shm && (choices & 128) != 0) {  // frames through memory
      impostor.share(rings.fd());
      impostor.speak_through(rings.stream());
    }
    uint64_t moved = 0;
    const uint64_t chunk = operation->places[0].bytes;
    if ((choices & 16) != 0)
      say(impostor, rings, input, call, messages ? bytes : chunk, first, &moved);  // before the call
    post();
    while (!input.empty()) say(impostor, rings, input, call, messages ? bytes : chunk, first, &moved);
    impostor.shut();
    for (const testing::Pending& entry : pending) {
      testing::require(entry.wait(std::chrono::seconds(5)).find("still in flight") == std::string::npos,
                       "an operation that does not end");
    }
  }
  buffers.reset();
  engine.leave(group);
  return 0;
}
