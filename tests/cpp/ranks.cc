#include "ranks.h"

#include <algorithm>
#include <atomic>
#include <thread>

namespace paceline::testing {

std::string Pending::wait(std::chrono::milliseconds limit) const {
  if (result_.wait_for(limit) != std::future_status::ready) return "still in flight: the test has waited long enough";
  return result_.get();
}

std::shared_ptr<const Program> Schedule::program(uint32_t rank, uint32_t num_ranks) const {
  std::vector<Row> rows;
  for (const Transfer& transfer : transfers) {
    if (transfer.from == rank) {
      rows.push_back({transfer.step, transfer.to, transfer.chunk, transfer.count, false, transfer.reduce});
    }
    if (transfer.to == rank) {
      rows.push_back({transfer.step, transfer.from, transfer.chunk, transfer.count, true, transfer.reduce});
    }
  }
  std::vector<SpreadRow> described;
  for (uint32_t number = 0; number < spreads.size(); ++number) {
    const auto& [step, from, chunk] = spreads[number];
    described.push_back({number, from, {}});
    for (uint32_t to = 0; to < num_ranks; ++to) {
      if (to == from) continue;
      described.back().receivers.push_back(to);
      if (from == rank) rows.push_back({step, to, chunk, 1, false, false, number});
      if (to == rank) rows.push_back({step, from, chunk, 1, true, false, number});
    }
  }
  return std::make_shared<Program>(rank, num_ranks, num_chunks, std::hash<std::string>{}(name), name, rows, in_order,
                                   in_turn, described);
}

Schedule swap_all_reduce() { return {"swap", 1, {{0, 0, 1, 0, 1, true}, {0, 1, 0, 0, 1, true}}}; }

Schedule swap_in_rounds(uint32_t num_chunks) {
  Schedule schedule{"swap in rounds", num_chunks, {}, true};
  for (uint32_t chunk = 0; chunk < num_chunks; ++chunk) {
    schedule.transfers.push_back({chunk, 0, 1, chunk, 1, true});
    schedule.transfers.push_back({chunk, 1, 0, chunk, 1, true});
  }
  return schedule;
}

Schedule ring_all_reduce(uint32_t n) {
  Schedule schedule{"ring", n, {}};
  for (uint32_t step = 0; step < 2 * (n - 1); ++step) {
    const bool reduce = step < n - 1;
    const uint32_t lag = reduce ? step : step - n;  // of the all-gather: rank r starts with chunk r + 1
    for (uint32_t rank = 0; rank < n; ++rank) {
      schedule.transfers.push_back({step, rank, (rank + 1) % n, (rank + 2 * n - lag) % n, 1, reduce});
    }
  }
  return schedule;
}

Schedule direct_all_reduce(uint32_t n) {
  Schedule schedule{"direct", 2, {}};
  for (uint32_t from = 0; from < n; ++from) {
    for (uint32_t to = 0; to < n; ++to) {
      if (from != to) schedule.transfers.push_back({0, from, to, 0, 2, true});
    }
  }
  return schedule;
}

Schedule chain_broadcast(uint32_t n, uint32_t num_chunks) {
  Schedule schedule{"chain", num_chunks, {}};
  for (uint32_t rank = 0; rank + 1 < n; ++rank) {
    for (uint32_t chunk = 0; chunk < num_chunks; ++chunk) {
      schedule.transfers.push_back({rank + chunk, rank, rank + 1, chunk, 1, false});
    }
  }
  return schedule;
}

Schedule multicast_broadcast(uint32_t num_chunks) {
  Schedule schedule{"multicast broadcast", num_chunks, {}};
  for (uint32_t chunk = 0; chunk < num_chunks; ++chunk) schedule.spreads.push_back({chunk, 0, chunk});
  return schedule;
}

Schedule multicast_all_gather(uint32_t n, uint32_t chains) {
  Schedule schedule{"multicast all-gather", n, {}};
  for (uint32_t rank = 0; rank < n; ++rank) schedule.spreads.push_back({rank / chains, rank, rank});
  return schedule;
}

Schedule multicast_behind_chain(uint32_t n) {
  Schedule schedule = chain_broadcast(n, 1);
  schedule.name = "multicast behind chain";
  schedule.spreads.push_back({n, n - 1, 0});
  return schedule;
}

std::vector<Place> cut(uint8_t* data, uint64_t count, uint64_t element_bytes, uint32_t num_chunks, uint8_t* nothing) {
  std::vector<Place> places;
  for (uint32_t chunk = 0; chunk < num_chunks; ++chunk) {
    const uint64_t begin = count * chunk / num_chunks * element_bytes;
    const uint64_t end = count * (chunk + 1) / num_chunks * element_bytes;
    places.push_back(end > begin ? Place{data + begin, data + begin, end - begin} : Place{nothing, nothing, 1});
  }
  return places;
}

Membership membership(uint32_t rank, uint32_t size) {
  static std::atomic<uint8_t> number{0};
  Membership membership;
  membership.id.fill(++number);
  membership.secret.fill(static_cast<uint8_t>(number + 1));
  membership.epoch = number;
  membership.rank = rank;
  membership.size = size;
  return membership;
}

Ranks::Ranks(uint32_t size, RankOptions options) : options_(options) {
  for (uint32_t rank = 0; rank < size; ++rank) {
    engines_.push_back(std::make_unique<Engine>(EngineOptions{"lo", options.shm, true}));
  }
  add_group();
}

Ranks::~Ranks() {
  std::vector<std::thread> leaving;  // at once: each waits for the others' goodbye
  for (uint32_t rank = 0; rank < size(); ++rank) {
    leaving.emplace_back([this, rank] {
      for (size_t number = 0; number < groups_.size(); ++number) {
        if (!left_[number][rank]) engines_[rank]->leave(groups_[number][rank]);
      }
    });
  }
  for (std::thread& thread : leaving) thread.join();
  groups_.clear();
}

size_t Ranks::add_group() {
  Membership member = membership(0, size());
  std::vector<PeerAddress> addresses;
  for (uint32_t rank = 0; rank < size(); ++rank) {
    addresses.push_back(engines_[rank]->address());
    addresses.back().host = "host" + std::to_string(rank);
  }
  groups_.emplace_back();
  left_.emplace_back(size());
  for (member.rank = 0; member.rank < size(); ++member.rank) {
    groups_.back().push_back(engines_[member.rank]->join(member));
  }
  for (uint32_t rank = 0; rank < size(); ++rank) engines_[rank]->introduce(groups_.back()[rank], addresses);
  return groups_.size() - 1;
}

void Ranks::spread_by_multicast(size_t group, const Filter& filter, PacketRates rates) {
  static std::atomic<uint16_t> port{42000};
  MulticastSettings settings;
  settings.group = "239.192.7.1";
  settings.port = port++;
  settings.interface_address = "127.0.0.1";
  settings.num_ranks = size();
  settings.group_id = groups_[group][0]->membership().id;
  settings.secret = groups_[group][0]->membership().secret;
  settings.others_on_host = true;
  for (uint32_t rank = 0; rank < size(); ++rank) {
    settings.rank = rank;
    if (filter) settings.receive_filter = [filter, rank](auto packet) { return filter(rank, packet); };
    engines_[rank]->spread_by(groups_[group][rank], Multicast::create(settings), rates);
  }
}

Pending Ranks::post(uint32_t rank, const std::shared_ptr<Operation>& operation, size_t group, bool later) {
  const auto promise = std::make_shared<std::promise<std::string>>();
  operation->timeout = options_.timeout;
  operation->on_done = [promise](const std::string& error) { promise->set_value(error); };
  engine(rank).post(this->group(rank, group), operation, later);
  return Pending(promise->get_future());
}

Pending Ranks::send(uint32_t rank, uint32_t to, uint32_t tag, std::vector<uint8_t>& bytes, size_t group) {
  const auto promise = std::make_shared<std::promise<std::string>>();
  const auto message = std::make_shared<Message>();
  message->peer = to;
  message->tag = tag;
  message->data = bytes.data();
  message->bytes = bytes.size();
  message->timeout = options_.timeout;
  message->on_done = [promise](const std::string& error) { promise->set_value(error); };
  engine(rank).send(this->group(rank, group), message);
  return Pending(promise->get_future());
}

Pending Ranks::receive(uint32_t rank, int64_t from, uint32_t tag, std::vector<uint8_t>& bytes, size_t group,
                       int64_t* sender, std::chrono::milliseconds timeout) {
  const auto promise = std::make_shared<std::promise<std::string>>();
  const auto message = std::make_shared<Message>();
  message->peer = from;
  message->tag = tag;
  message->data = bytes.data();
  message->bytes = bytes.size();
  message->timeout = timeout;
  message->on_done = [promise, sender, message = message.get()](const std::string& error) {
    if (sender != nullptr) *sender = message->peer;
    promise->set_value(error);
  };
  engine(rank).receive(this->group(rank, group), message);
  return Pending(promise->get_future());
}

void Ranks::kill(uint32_t rank) {
  for (size_t number = 0; number < groups_.size(); ++number) {
    groups_[number][rank].reset();
    left_[number][rank] = true;
  }
  engines_[rank].reset();
}

void Ranks::revive(uint32_t rank) {
  engines_[rank] = std::make_unique<Engine>(EngineOptions{"lo", options_.shm, true});
  Membership member = groups_[0][rank == 0 ? 1 : 0]->membership();
  member.rank = rank;
  std::vector<PeerAddress> addresses = member.addresses;
  addresses[rank] = engines_[rank]->address();
  groups_[0][rank] = engines_[rank]->join(std::move(member));
  left_[0][rank] = false;
  engines_[rank]->introduce(groups_[0][rank], addresses);
  for (uint32_t other = 0; other < size(); ++other) {
    if (other != rank) engines_[other]->introduce(groups_[0][other], rank, addresses[rank]);
  }
}

std::string Ranks::leave(uint32_t rank, size_t group) {
  left_[group][rank] = true;
  return engine(rank).leave(this->group(rank, group));
}

Job::Job(const Schedule& schedule, Kind kind, uint32_t num_ranks, uint64_t count, uint32_t seed)
    : kind_(kind), count_(count), nothing_(num_ranks), expected_(count) {
  std::mt19937 random(seed);
  for (uint32_t rank = 0; rank < num_ranks; ++rank) {
    programs_.push_back(schedule.program(rank, num_ranks));
    std::vector<int32_t>& buffer = buffers_.emplace_back(count);
    for (int32_t& value : buffer) value = static_cast<int32_t>(random() % 1000);
    const uint64_t first = kind == Kind::kAllGather ? count * rank / num_ranks : 0;
    const uint64_t end = kind == Kind::kAllGather ? count * (rank + 1) / num_ranks : count;
    for (uint64_t i = first; i < end; ++i) {
      if (kind != Kind::kBroadcast || rank == 0) expected_[i] += buffer[i];
    }
  }
}

std::shared_ptr<Operation> Job::operation(uint32_t rank) const {
  auto operation = std::make_shared<Operation>();
  operation->call = {kind_, DType::kInt32, ReduceOp::kSum, 0, 0, count_, 0};
  operation->program = programs_[rank];
  operation->places = cut(reinterpret_cast<uint8_t*>(buffers_[rank].data()), count_, sizeof(int32_t),
                          programs_[rank]->num_chunks(), &nothing_[rank]);
  return operation;
}

bool Job::right() const {
  return std::all_of(buffers_.begin(), buffers_.end(), [&](const auto& buffer) { return buffer == expected_; });
}

std::vector<uint8_t> random_bytes(size_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> bytes(size);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

}  // namespace paceline::testing
