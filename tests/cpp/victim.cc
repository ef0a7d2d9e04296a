#include "victim.h"

#include <gtest/gtest.h>

#include <thread>

namespace paceline::testing {

using namespace std::chrono_literals;

Victim::Victim(bool shm) : engine_({"lo", shm, true}), shm_(shm), member_(membership(0, 2)) {
  group_ = engine_.join(member_);
  engine_.introduce(group_, {engine_.address(), {"impostor", "127.0.0.1:1", ""}});
}

Victim::~Victim() { engine_.leave(group_); }

void Victim::spread_by_multicast() {
  MulticastSettings settings;
  settings.group = "239.192.7.2";
  settings.port = 41999;
  settings.interface_address = "127.0.0.1";
  settings.num_ranks = 2;
  settings.group_id = member_.id;
  settings.secret = member_.secret;
  engine_.spread_by(group_, Multicast::create(settings), {10'000'000, 10'000'000});
}

Impostor Victim::impostor(Lane lane) {
  Impostor impostor(engine_, shm_);
  Membership other = member_;
  other.rank = 1;
  EXPECT_TRUE(impostor.introduce(other, 0, lane));
  std::this_thread::sleep_for(20ms);  // until the engine has read the last message
  return impostor;
}

Pending Victim::post(const Job& job, std::chrono::milliseconds timeout, uint64_t number) {
  operation_ = job.operation(0);
  operation_->number = number;
  operation_->timeout = timeout;
  const auto promise = std::make_shared<std::promise<std::string>>();
  operation_->on_done = [promise](const std::string& error) { promise->set_value(error); };
  engine_.post(group_, operation_, true);
  return Pending(promise->get_future());
}

Pending Victim::message(bool receives, uint32_t tag, std::vector<uint8_t>& bytes, std::chrono::milliseconds timeout) {
  const auto promise = std::make_shared<std::promise<std::string>>();
  const auto message = std::make_shared<Message>();
  message->peer = 1;
  message->tag = tag;
  message->data = bytes.data();
  message->bytes = bytes.size();
  message->timeout = timeout;
  message->on_done = [promise](const std::string& error) { promise->set_value(error); };
  if (receives) {
    engine_.receive(group_, message);
  } else {
    engine_.send(group_, message);
  }
  return Pending(promise->get_future());
}

std::string Victim::fails() {
  for (int i = 0; i < 500 && failure().empty(); ++i) std::this_thread::sleep_for(10ms);
  return failure();
}

FrameHeader data_frame(const Call& call, uint64_t total, uint64_t offset, uint64_t length) {
  FrameHeader header;
  header.type = FrameType::kData;
  header.seq = 1;
  header.total = total;
  header.offset = offset;
  header.length = length;
  header.call = call;
  return header;
}

FrameHeader message_frame(FrameType type, uint64_t number, uint32_t tag, uint64_t length) {
  FrameHeader header;
  header.type = type;
  header.seq = number;
  header.id = tag;
  header.length = length;
  header.total = length;
  return header;
}

Job to_zero(uint64_t count) { return {{"to zero", 1, {{0, 1, 0, 0, 1, false}}}, Kind::kBroadcast, 2, count, 1}; }

}  // namespace paceline::testing
