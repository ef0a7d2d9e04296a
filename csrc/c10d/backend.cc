#include "c10d/backend.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <bit>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "c10d/rendezvous.h"
#include "common/attempt.h"
#include "common/cores.h"

namespace paceline {
namespace {

// How long a waiting caller polls before it sleeps. A core that fell asleep needs a good part of a millisecond to come
// back where it is a virtual one: who sleeps sooner makes the others sleep as well, again and again.
constexpr std::chrono::microseconds kPolling = std::chrono::milliseconds(1);
constexpr std::chrono::microseconds kPollingInTurns = std::chrono::microseconds(300);
constexpr std::chrono::microseconds kPollingAlone = std::chrono::microseconds(100);

// Ranks that have no core each poll less: they take it in turns. So does who has only a network to wait for.
Waiting way_to_wait(const std::vector<std::string>& hosts, size_t rank) {
  const auto self = hosts.begin() + static_cast<std::ptrdiff_t>(rank);
  const auto before = static_cast<size_t>(std::count(hosts.begin(), self, *self));
  const auto here = before + static_cast<size_t>(std::count(self, hosts.end(), *self));
  if (here == 1) return {kPollingAlone, -1};
  const std::vector<int> cores = allowed_cores();
  if (cores.empty() || here <= cores.size()) return {kPolling, -1};
  return {kPollingInTurns, cores[before % cores.size()]};
}

}  // namespace

Backend::Backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Settings settings)
    : c10d::Backend(rank, size),
      settings_(std::move(settings)),
      options_(c10::make_intrusive<Options>("paceline", settings_.timeout)),
      engine_(settings_.engine) {
  be_ready_to_run_elsewhere();
  const c10::intrusive_ptr<c10d::Store> part = fresh_part(store, rank);
  const std::string known = rank == 0 && size > 1 ? settings_.known_links() : "";
  const Meeting meeting =
      meet(engine_, *part, static_cast<uint32_t>(rank), static_cast<uint32_t>(size), {settings_.host, known});
  group_ = meeting.group;
  std::vector<std::string> hosts;
  for (const PeerAddress& address : group_->membership().addresses) {
    // Ranks that can share memory are on one host, whatever it is called.
    hosts.push_back(address.shm.empty() ? address.host : address.shm.substr(0, address.shm.find(' ')));
  }
  waiting_ = way_to_wait(hosts, static_cast<size_t>(rank));
  try {
    Plans plans = settings_.make_planner(
        rank, part, hosts, meeting.links,
        [this](int to, int from, uint64_t bytes) { return exchange_seconds(to, from, bytes); },
        [&](const MulticastWish& wish) { return try_multicast(*engine_, group_, *part, wish); });
    programs_ = std::make_shared<Programs>(std::move(plans.planner));
    if (plans.rules.enabled) least_awaiting_bytes_ = plans.least_awaiting_bytes;
    plans.rules.elsewhere = [engine = engine_](std::function<void()> task) {
      run_elsewhere([engine, task = std::move(task)] { task(); });
    };
    engine_->decide_by(group_, std::move(plans.rules));
  } catch (const std::exception& error) {
    engine_->abort(group_, "rank " + std::to_string(rank) + " cannot join the group: " + error.what());
    engine_->leave(group_);
    throw;
  }
  init();
}

Backend::Backend(const std::string& shared, int rank, int size, Settings settings, Planner planner)
    : c10d::Backend(rank, size),
      settings_(std::move(settings)),
      options_(c10::make_intrusive<Options>("paceline", settings_.timeout)),
      engine_(settings_.engine),
      waiting_{kPollingAlone, -1},
      programs_(std::make_shared<Programs>(std::move(planner))) {
  be_ready_to_run_elsewhere();
  TORCH_CHECK(rank >= 0 && rank < size, "the worker's number is ", rank, ": it must be from 0 to ", size - 1);
  TORCH_CHECK(shared.size() == kGroupBytes, "members share ", kGroupBytes, " bytes, not ", shared.size());
  const std::vector<uint8_t> bytes(shared.begin(), shared.end());
  group_ = engine_->join(membership(std::span<const uint8_t, kGroupBytes>(bytes.data(), kGroupBytes),
                                    static_cast<uint32_t>(rank), static_cast<uint32_t>(size)));
  std::vector<PeerAddress> nobody(static_cast<size_t>(size));
  nobody[static_cast<size_t>(rank)] = engine_->address();
  nobody[static_cast<size_t>(rank)].host = settings_.host;
  engine_->introduce(group_, std::move(nobody));
  init();
}

Backend::~Backend() { leave(); }

void Backend::introduce(int peer, const std::string& address) {
  TORCH_CHECK(peer >= 0 && peer < size_, "there is no place ", peer, ": places are 0 to ", size_ - 1);
  engine_->introduce(group_, static_cast<uint32_t>(peer), parse_address(address));
}

std::string Backend::leave() {
  if (left_.exchange(true)) return "";
  if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {  // collected by Python: others may need its lock meanwhile
    const pybind11::gil_scoped_release unlocked;
    return engine_->leave(group_);
  }
  return engine_->leave(group_);
}

void Backend::shutdown() {
  const std::string unheard = leave();
  if (!unheard.empty()) std::rethrow_exception(backend_error("destroy_process_group: " + unheard));
}

void Backend::abort() {
  engine_->abort(group_, "rank " + std::to_string(rank_) + " aborted the group");
  leave();
}

c10d::ErrorType Backend::getError() {
  return failure().empty() ? c10d::ErrorType::SUCCESS : c10d::ErrorType::COMM_ERROR;
}

c10::intrusive_ptr<c10d::Backend> Backend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const std::vector<int>& ranks,
                                                 const c10::intrusive_ptr<Options>& options) {
  const auto found = std::find(ranks.begin(), ranks.end(), rank_);
  if (found == ranks.end()) return nullptr;
  Settings settings = settings_;
  if (options) settings.timeout = options->timeout;
  const auto split_store = c10::make_intrusive<c10d::PrefixStore>("split/", store);
  return c10::make_intrusive<Backend>(split_store, static_cast<int>(found - ranks.begin()),
                                      static_cast<int>(ranks.size()), std::move(settings));
}

std::chrono::milliseconds Backend::timeout_or_default(std::chrono::milliseconds timeout) const {
  return std::clamp(timeout == c10d::kUnsetTimeout ? options_->timeout : timeout, -kLongestTimeout, kLongestTimeout);
}

void Backend::check_root(int64_t root, int64_t root_tensor, const char* operation) const {
  TORCH_CHECK(root >= 0 && root < size_, operation, ": invalid root rank: ", root, " (the ranks are 0 to ", size_ - 1,
              ")");
  TORCH_CHECK(root_tensor == 0, operation, ": invalid root tensor: ", root_tensor, " (a rank passes one tensor)");
}

c10::intrusive_ptr<Work> Backend::make_work(c10d::OpType type, Tensors outputs, size_t parts) {
  auto work = c10::make_intrusive<Work>(rank_, type, std::move(outputs), sequence_.load() + 1, static_cast<int>(parts));
  work->let_help(engine_, group_, waiting_);
  return work;
}

at::Tensor Backend::apart(Work& work, const at::Tensor& output, const char* operation) {
  check_writable(output, operation);
  at::Tensor copy = output.clone(at::MemoryFormat::Contiguous);
  work.copy_at_the_end(output, copy);
  return copy;
}

PlanRequest Backend::wanted(const Request& request) const {
  const DType dtype = request.call.dtype;
  const bool floating = dtype <= DType::kBFloat16;
  PlanRequest wanted;
  wanted.kind = request.call.kind;
  wanted.root = request.call.root;
  wanted.bytes = std::bit_ceil(std::max<uint64_t>(request.bytes, 1));
  wanted.members = request.members;
  wanted.exact = !floating || (wanted.kind != Kind::kAllReduce && wanted.kind != Kind::kReduceScatter &&
                               wanted.kind != Kind::kReduce);
  return wanted;
}

void Backend::post(const c10::intrusive_ptr<Work>& work, Request request, const Manner& manner) {
  TORCH_CHECK(!left_, "this process group was destroyed");
  engine_->refuse_in_child();
  const auto operation = std::make_shared<Operation>();
  operation->call = request.call;
  operation->timeout = timeout_or_default(manner.timeout);
  operation->number = request.number;
  if (work->copies_at_the_end()) {
    operation->epilogue = [work, finish = std::move(request.finish), finished = false]() mutable {
      if (!finish.empty() && finish()) return true;
      if (!std::exchange(finished, true) && !work->last_part()) return false;
      return work->copy_slice();
    };
  } else if (!request.finish.empty()) {
    operation->epilogue = std::move(request.finish);
  }
  operation->on_done = [work](const std::string& error) { work->done(error); };
  PlanRequest wanted = this->wanted(request);
  if (wanted.kind == Kind::kAllReduce && wanted.members.empty() && request.bytes >= least_awaiting_bytes_) {
    operation->prepare = [programs = programs_, wanted, dtype = request.call.dtype, blocks = std::move(request.blocks)](
                             const std::string& choice, bool may_wait) mutable -> std::optional<Prepared> {
      wanted.choice = choice;
      Prepared prepared;
      prepared.program = may_wait ? programs->get(wanted) : programs->find(wanted);
      if (prepared.program == nullptr) return std::nullopt;
      std::vector<size_t> homeless;  // none: an all-reduce works in place
      prepared.places = cut(*prepared.program, dtype, blocks, &homeless);
      return prepared;
    };
  } else {
    operation->program = programs_->get(wanted);
    place(*engine_, *operation, request.blocks);
  }
  if (request.number == 0) ++sequence_;
  engine_->post(group_, operation, manner.asynchronous);
  work->posted(*operation);
}

Backend::WorkPtr Backend::run(const c10::intrusive_ptr<Work>& work, Request request, const Footprint& footprint,
                              const Manner& manner) {
  post(work, std::move(request), manner);
  return handle(work, footprint, manner);
}

Backend::WorkPtr Backend::run(const c10::intrusive_ptr<Work>& work, std::vector<Request> requests,
                              const Footprint& footprint, const Manner& manner) {
  for (Request& request : requests) post(work, std::move(request), manner);
  return handle(work, footprint, manner);
}

Backend::WorkPtr Backend::handle(const c10::intrusive_ptr<Work>& work, const Footprint& footprint,
                                 const Manner& manner) {
  if (!manner.asynchronous) {
    work->wait(kNoTimeout);
    return nullptr;
  }
  if (!work->finished()) {
    const std::lock_guard lock(in_flight_mutex_);
    in_flight_.push_back({footprint, c10::weak_intrusive_ptr<Work>(work)});
  }
  return work;
}

void Backend::await_memory(const Footprint& footprint) {
  std::vector<c10::intrusive_ptr<Work>> seen, earlier;  // not to be let go of under the lock: that may take Python's
  {
    const std::lock_guard lock(in_flight_mutex_);
    std::erase_if(in_flight_, [&](const InFlight& in_flight) {
      seen.push_back(in_flight.work.lock());
      if (!seen.back() || seen.back()->finished()) return true;
      if (footprint.overlaps(in_flight.footprint)) earlier.push_back(seen.back());
      return false;
    });
  }
  // What went wrong there, this call will find out by itself.
  for (const auto& work : earlier) attempt([&] { work->wait(kNoTimeout); });
}

}  // namespace paceline
