#include "c10d/backend.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <bit>
#include <future>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "c10d/rendezvous.h"

namespace paceline {
namespace {

// Tags of our own messages are beyond those users can choose.
constexpr uint32_t kMonitorTag = 0x80000000;
constexpr uint32_t kExchangeTag = 0xffffffff;

constexpr auto kSpin = std::chrono::microseconds(100);

ReduceOp op_of(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::PREMUL_SUM:
      return ReduceOp::kSum;
    case c10d::ReduceOp::AVG:
      return ReduceOp::kAverage;
    case c10d::ReduceOp::PRODUCT:
      return ReduceOp::kProduct;
    case c10d::ReduceOp::MIN:
      return ReduceOp::kMin;
    case c10d::ReduceOp::MAX:
      return ReduceOp::kMax;
    case c10d::ReduceOp::BAND:
      return ReduceOp::kBitAnd;
    case c10d::ReduceOp::BOR:
      return ReduceOp::kBitOr;
    case c10d::ReduceOp::BXOR:
      return ReduceOp::kBitXor;
    default:
      TORCH_CHECK_VALUE(false, "this reduce operation is not known to the paceline backend");
  }
}

double factor_of(const c10d::ReduceOp& op) {
  const auto* supplement = dynamic_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(supplement != nullptr, "PREMUL_SUM needs a factor: make it with _make_nccl_premul_sum");
  return supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>() : supplement->double_factor;
}

// Complex numbers are added as pairs of real ones.
at::Tensor as_real(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  const bool adds =
      op.op_ == c10d::ReduceOp::SUM || op.op_ == c10d::ReduceOp::AVG || op.op_ == c10d::ReduceOp::PREMUL_SUM;
  return tensor.is_complex() && adds ? at::view_as_real(tensor) : tensor;
}

void check_reducible(const at::Tensor& tensor, ReduceOp op) {
  TORCH_CHECK_VALUE(find_reduction(dtype_of(tensor), op) != nullptr, "the paceline backend cannot compute ", name(op),
                    " of ", tensor.scalar_type());
}

const at::Tensor& single(const std::vector<at::Tensor>& tensors, const char* operation) {
  TORCH_CHECK_VALUE(tensors.size() == 1, operation, " takes one tensor a rank, not ", tensors.size());
  return tensors.front();
}

template <typename T>
const T& single_list(const std::vector<T>& lists, const char* operation) {
  TORCH_CHECK_VALUE(lists.size() == 1, operation, " takes one list of tensors a rank, not ", lists.size());
  return lists.front();
}

void check_same_type(const at::Tensor& a, const at::Tensor& b, const char* operation) {
  TORCH_CHECK_TYPE(a.scalar_type() == b.scalar_type(), operation, " takes tensors of one type, not of ",
                   a.scalar_type(), " and ", b.scalar_type());
}

// In whatever thread, and whatever the tensor is to autograd: the caller has been told that it will be overwritten.
void copy_back(const at::Tensor& to, const at::Tensor& from) {
  const at::AutoDispatchBelowADInplaceOrView below;
  to.copy_(from);
}

void copy_bytes(uint8_t* to, const uint8_t* from, uint64_t bytes) {
  if (bytes > 0 && to != from) std::memmove(to, from, bytes);
}

}  // namespace

Backend::Backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Settings settings)
    : c10d::Backend(rank, size),
      settings_(std::move(settings)),
      options_(c10::make_intrusive<Options>("paceline", settings_.timeout)),
      engine_(settings_.engine) {
  group_ = meet(engine_, *store, static_cast<uint32_t>(rank), static_cast<uint32_t>(size), settings_.host);
  std::vector<std::string> hosts;
  for (const PeerAddress& address : group_->membership().addresses) {
    // Ranks whose memory can be pulled from are on one host, whatever it is called.
    hosts.push_back(address.shm.empty() ? address.host : address.shm.substr(0, address.shm.find(' ')));
  }
  // Polling a moment before sleeping is polite only when no other rank wants the core.
  const auto here = std::count(hosts.begin(), hosts.end(), hosts[static_cast<size_t>(rank)]);
  if (here <= static_cast<std::ptrdiff_t>(std::thread::hardware_concurrency())) spin_ = kSpin;
  try {
    Plans plans = settings_.make_planner(rank, size, store, hosts, [this](int to, int from, uint64_t bytes) {
      return exchange_seconds(to, from, bytes);
    });
    programs_ = std::make_shared<Programs>(std::move(plans.planner));
    if (plans.rules.enabled) least_awaiting_bytes_ = plans.least_awaiting_bytes;
    plans.rules.elsewhere = [engine = engine_](std::function<void()> task) {
      run_elsewhere([engine, task = std::move(task)] { task(); });
    };
    engine_->decide_by(group_, std::move(plans.rules));
  } catch (...) {
    engine_->leave(group_);
    throw;
  }
  init();
}

Backend::~Backend() { shutdown(); }

void Backend::shutdown() {
  if (left_.exchange(true)) return;
  if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {  // collected by Python: others may need its lock meanwhile
    const pybind11::gil_scoped_release unlocked;
    engine_->leave(group_);
  } else {
    engine_->leave(group_);
  }
}

void Backend::abort() {
  engine_->abort(group_, "rank " + std::to_string(rank_) + " aborted the group");
  shutdown();
}

c10d::ErrorType Backend::getError() {
  return engine_->failure(group_).empty() ? c10d::ErrorType::SUCCESS : c10d::ErrorType::COMM_ERROR;
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
  return timeout == c10d::kUnsetTimeout ? options_->timeout : timeout;
}

void Backend::check_root(int64_t root, const char* operation) const {
  TORCH_CHECK_VALUE(root >= 0 && root < size_, operation, " has root ", root, ", and the ranks are 0 to ", size_ - 1);
}

c10::intrusive_ptr<Work> Backend::make_work(c10d::OpType type, const char* title, const Tensors& inputs,
                                            Tensors outputs, size_t parts) {
  auto work = c10::make_intrusive<Work>(rank_, type, title, inputs, std::move(outputs), sequence_.load() + 1,
                                        static_cast<int>(parts));
  work->let_help(engine_, spin_);
  return work;
}

PlanRequest Backend::wanted(const Request& request) const {
  const DType dtype = request.call.dtype;
  const bool floating = dtype <= DType::kBFloat16;
  PlanRequest wanted;
  wanted.kind = request.call.kind;
  wanted.root = request.call.root;
  wanted.bytes = std::bit_ceil(std::max<uint64_t>(request.bytes, 1));
  wanted.exact = !floating || (wanted.kind != Kind::kAllReduce && wanted.kind != Kind::kReduceScatter &&
                               wanted.kind != Kind::kReduce);
  return wanted;
}

void Backend::post(const c10::intrusive_ptr<Work>& work, Request request) {
  TORCH_CHECK(!left_, "this process group was destroyed");
  auto operation = std::make_shared<Operation>();
  operation->call = request.call;
  operation->timeout = timeout_or_default(request.timeout);
  operation->epilogue = std::move(request.epilogue);
  operation->on_done = [work](const std::string& error) { work->done(error); };
  PlanRequest wanted = this->wanted(request);
  if (wanted.kind == Kind::kAllReduce && request.bytes >= least_awaiting_bytes_) {
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
  ++sequence_;
  engine_->post(group_, operation, request.asynchronous);
}

void Backend::add_allreduce(const c10::intrusive_ptr<Work>& work, const at::Tensor& any, const c10d::ReduceOp& op,
                            std::chrono::milliseconds timeout, bool asynchronous) {
  const at::Tensor tensor = as_real(any, op);
  const Contiguous flat = contiguous(tensor);
  Request request;
  request.call = {Kind::kAllReduce, dtype_of(tensor), op_of(op), 0, 0, count_of(tensor), 0};
  check_reducible(tensor, request.call.op);
  request.bytes = flat.bytes();
  request.blocks = {{flat.data(), flat.data(), flat.bytes()}};
  request.timeout = timeout;
  request.asynchronous = asynchronous;
  if (op.op_ == c10d::ReduceOp::PREMUL_SUM) {
    multiply(request.call.dtype, flat.data(), flat.data(), request.call.count, factor_of(op));
  }
  const bool average = request.call.op == ReduceOp::kAverage;
  if (average || flat.copied) {
    request.epilogue = [flat, tensor, average, call = request.call, size = size_]() mutable {
      if (average) divide(call.dtype, flat.data(), call.count, size);
      if (flat.copied) copy_back(tensor, flat.tensor);
    };
  }
  work->keep(flat.tensor);
  post(work, std::move(request));
}

Backend::WorkPtr Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  single(tensors, "all_reduce");
  if (tensors.front().layout() == at::kSparse) return allreduce_sparse(tensors, options);
  const auto work = make_work(c10d::OpType::ALLREDUCE, "paceline:all_reduce", tensors, tensors);
  add_allreduce(work, tensors.front(), options.reduceOp, options.timeout, options.asyncOp);
  return work;
}

Backend::WorkPtr Backend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  TORCH_CHECK_VALUE(!tensors.empty(), "all_reduce_coalesced takes at least one tensor");
  const auto work =
      make_work(c10d::OpType::ALLREDUCE_COALESCED, "paceline:all_reduce", tensors, tensors, tensors.size());
  for (const at::Tensor& tensor : tensors)
    add_allreduce(work, tensor, options.reduceOp, options.timeout, options.asyncOp);
  return work;
}

// As Gloo has it: every rank learns how many entries each has, then their indices and values, and adds them up. Ranks
// have different numbers of entries, so the parts are gathered in uneven blocks.
Backend::WorkPtr Backend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  at::Tensor& tensor = const_cast<at::Tensor&>(single(tensors, "all_reduce"));
  TORCH_CHECK_VALUE(options.reduceOp == c10d::ReduceOp::SUM, "a sparse all_reduce can only sum");
  const auto work = make_work(c10d::OpType::_ALLREDUCE_SPARSE, "paceline:sparse_all_reduce", tensors, tensors);
  const at::Tensor coalesced = tensor.coalesce();
  at::Tensor indices = coalesced.indices().t().contiguous();
  at::Tensor values = coalesced.values().contiguous();
  Tensors counts(static_cast<size_t>(size_));
  for (at::Tensor& count : counts) count = at::empty({1}, at::kLong);
  TensorLists count_list{counts};
  Tensors own{at::full({1}, coalesced._nnz(), at::kLong)};
  c10d::AllgatherOptions gather_options;
  gather_options.timeout = options.timeout;
  // The number of entries decides what is posted next, so this part blocks; the rest need not.
  allgather(count_list, own, gather_options)->wait();
  auto all_indices = std::make_shared<Tensors>();
  auto all_values = std::make_shared<Tensors>();
  for (const at::Tensor& count : counts) {
    auto index_shape = indices.sizes().vec(), value_shape = values.sizes().vec();
    index_shape[0] = value_shape[0] = count.item<int64_t>();
    all_indices->push_back(at::empty(index_shape, indices.options()));
    all_values->push_back(at::empty(value_shape, values.options()));
  }
  TensorLists index_list{*all_indices}, value_list{*all_values};
  Tensors own_indices{indices}, own_values{values};
  allgather(index_list, own_indices, gather_options)->wait();
  allgather(value_list, own_values, gather_options)->wait();
  at::Tensor sum = at::sparse_coo_tensor(at::cat(*all_indices).t(), at::cat(*all_values), tensor.sizes()).coalesce();
  tensor.copy_(sum);
  work->done("");
  return work;
}

Backend::WorkPtr Backend::exchange(c10d::OpType type, const char* title, Tensors inputs, Tensors outputs,
                                   Request request) {
  const auto work = make_work(type, title, inputs, std::move(outputs));
  for (at::Tensor& input : inputs) work->keep(std::move(input));
  post(work, std::move(request));
  return work;
}

Backend::WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor tensor = as_real(single(tensors, "reduce"), options.reduceOp);
  check_root(options.rootRank, "reduce");
  Contiguous flat = contiguous(tensor);
  Request request;
  request.call = {Kind::kReduce,
                  dtype_of(tensor),
                  op_of(options.reduceOp),
                  0,
                  static_cast<int32_t>(options.rootRank),
                  count_of(tensor),
                  0};
  check_reducible(tensor, request.call.op);
  const bool root = rank_ == options.rootRank;
  if (options.reduceOp.op_ == c10d::ReduceOp::PREMUL_SUM) {
    if (!root && !flat.copied) flat = {flat.tensor.clone(), true};  // the tensors of other ranks stay as they are
    multiply(request.call.dtype, flat.data(), flat.data(), request.call.count, factor_of(options.reduceOp));
  }
  request.bytes = flat.bytes();
  request.blocks = {{flat.data(), root ? flat.data() : nullptr, flat.bytes()}};
  request.timeout = options.timeout;
  request.asynchronous = options.asyncOp;
  const bool average = request.call.op == ReduceOp::kAverage;
  if (root && (average || flat.copied)) {
    request.epilogue = [flat, tensor, average, call = request.call, size = size_]() mutable {
      if (average) divide(call.dtype, flat.data(), call.count, size);
      if (flat.copied) copy_back(tensor, flat.tensor);
    };
  }
  return exchange(c10d::OpType::REDUCE, "paceline:reduce", {flat.tensor}, tensors, std::move(request));
}

Backend::WorkPtr Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  at::Tensor tensor = single(tensors, "broadcast");
  check_root(options.rootRank, "broadcast");
  const Contiguous flat = contiguous(tensor);
  Request request;
  request.call = {Kind::kBroadcast,
                  dtype_of(tensor),
                  ReduceOp::kSum,
                  0,
                  static_cast<int32_t>(options.rootRank),
                  count_of(tensor),
                  0};
  request.bytes = flat.bytes();
  request.blocks = {{flat.data(), flat.data(), flat.bytes()}};
  request.timeout = options.timeout;
  request.asynchronous = options.asyncOp;
  if (flat.copied && rank_ != options.rootRank) {
    request.epilogue = [flat, tensor]() mutable { copy_back(tensor, flat.tensor); };
  }
  return exchange(c10d::OpType::BROADCAST, "paceline:broadcast", {flat.tensor}, tensors, std::move(request));
}

void Backend::add_allgather(const c10::intrusive_ptr<Work>& work, const Tensors& outputs, const at::Tensor& input,
                            std::chrono::milliseconds timeout, bool asynchronous) {
  TORCH_CHECK_VALUE(outputs.size() == static_cast<size_t>(size_), "all_gather needs ", size_,
                    " output tensors, one a rank, not ", outputs.size());
  const Contiguous in = contiguous(input);
  std::vector<Contiguous> outs;
  Request request;
  request.call = {Kind::kAllGather, dtype_of(input), ReduceOp::kSum, 0, 0, 0, 0};
  bool copied = false;
  for (const at::Tensor& output : outputs) {
    check_same_type(input, output, "all_gather");
    outs.push_back(contiguous(output));
    copied = copied || outs.back().copied;
    request.call.count += count_of(output);
    request.bytes += outs.back().bytes();
    request.blocks.push_back({nullptr, outs.back().data(), outs.back().bytes()});
    work->keep(outs.back().tensor);
  }
  Block& own = request.blocks[static_cast<size_t>(rank_)];
  TORCH_CHECK_VALUE(own.bytes == in.bytes(), "all_gather: the input of rank ", rank_, " has ", input.numel(),
                    " elements, and its output tensor has ", outputs[static_cast<size_t>(rank_)].numel());
  own.input = in.data();
  copy_bytes(own.output, in.data(), own.bytes);
  request.timeout = timeout;
  request.asynchronous = asynchronous;
  if (copied) {
    request.epilogue = [outs, outputs] {
      for (size_t i = 0; i < outs.size(); ++i) {
        if (outs[i].copied) copy_back(outputs[i], outs[i].tensor);
      }
    };
  }
  work->keep(in.tensor);
  post(work, std::move(request));
}

Backend::WorkPtr Backend::allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const Tensors& list = single_list(outputs, "all_gather");
  const auto work = make_work(c10d::OpType::ALLGATHER, "paceline:all_gather", inputs, list);
  add_allgather(work, list, single(inputs, "all_gather"), options.timeout, options.asyncOp);
  return work;
}

namespace {

// The equal parts of a flat tensor, one a rank.
std::vector<at::Tensor> parts(const at::Tensor& tensor, int size, const char* operation) {
  TORCH_CHECK_VALUE(tensor.numel() % size == 0, operation, ": ", tensor.numel(), " elements cannot be shared by ", size,
                    " ranks equally");
  TORCH_CHECK_VALUE(tensor.is_contiguous(), operation, " needs a contiguous tensor");
  return tensor.view({-1}).chunk(size).size() == static_cast<size_t>(size)
             ? tensor.view({-1}).chunk(size)
             : std::vector<at::Tensor>(static_cast<size_t>(size), tensor.view({-1}));
}

}  // namespace

Backend::WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::AllgatherOptions& options) {
  TORCH_CHECK_VALUE(output.numel() == input.numel() * size_, "all_gather_into_tensor: the output has ", output.numel(),
                    " elements, and ", size_, " ranks with ", input.numel(), " each give ", input.numel() * size_);
  Tensors inputs{input};
  const auto work = make_work(c10d::OpType::_ALLGATHER_BASE, "paceline:_all_gather_base", inputs, {output});
  add_allgather(work, parts(output, size_, "all_gather_into_tensor"), input, options.timeout, options.asyncOp);
  return work;
}

Backend::WorkPtr Backend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) {
  TORCH_CHECK_VALUE(!inputs.empty(), "all_gather_coalesced takes at least one tensor");
  Tensors all;
  // c10d has two orders for the lists: one list a rank (each with every input), or one list an input.
  const bool by_rank = outputs.size() == static_cast<size_t>(size_) && outputs.front().size() == inputs.size();
  TORCH_CHECK_VALUE(by_rank || outputs.size() == inputs.size(),
                    "all_gather_coalesced needs an output list for each rank");
  for (const Tensors& list : outputs) all.insert(all.end(), list.begin(), list.end());
  const auto work =
      make_work(c10d::OpType::ALLGATHER_COALESCED, "paceline:all_gather", inputs, std::move(all), inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors list;
    if (by_rank) {
      for (const Tensors& of_rank : outputs) list.push_back(of_rank[i]);
    } else {
      list = outputs[i];
    }
    add_allgather(work, list, inputs[i], options.timeout, options.asyncOp);
  }
  return work;
}

Backend::WorkPtr Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::AllgatherOptions& options) {
  TORCH_CHECK_VALUE(!inputs.empty() && inputs.size() == outputs.size(),
                    "all_gather_into_tensor_coalesced needs as many outputs as inputs");
  const auto work = make_work(c10d::OpType::ALLGATHER_COALESCED, "paceline:all_gather", inputs, outputs, inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    add_allgather(work, parts(outputs[i], size_, "all_gather_into_tensor_coalesced"), inputs[i], options.timeout,
                  options.asyncOp);
  }
  return work;
}

void Backend::add_reduce_scatter(const c10::intrusive_ptr<Work>& work, const at::Tensor& any, const Tensors& inputs,
                                 const c10d::ReduceOp& op, std::chrono::milliseconds timeout, bool asynchronous) {
  const at::Tensor output = as_real(any, op);
  TORCH_CHECK_VALUE(inputs.size() == static_cast<size_t>(size_), "reduce_scatter needs ", size_,
                    " input tensors, one a rank, not ", inputs.size());
  const Contiguous out = contiguous(output);
  Request request;
  request.call = {Kind::kReduceScatter, dtype_of(output), op_of(op), 0, 0, 0, 0};
  check_reducible(output, request.call.op);
  const bool scaled = op.op_ == c10d::ReduceOp::PREMUL_SUM;
  for (const at::Tensor& part : inputs) {
    const at::Tensor input = as_real(part, op);
    check_same_type(input, output, "reduce_scatter");
    Contiguous in = contiguous(input);
    if (scaled) {  // the input stays as it is
      in = {in.copied ? in.tensor : in.tensor.clone(), true};
      multiply(request.call.dtype, in.data(), in.data(), count_of(in.tensor), factor_of(op));
    }
    request.call.count += count_of(input);
    request.bytes += in.bytes();
    request.blocks.push_back({in.data(), nullptr, in.bytes()});
    work->keep(in.tensor);
  }
  Block& own = request.blocks[static_cast<size_t>(rank_)];
  TORCH_CHECK_VALUE(own.bytes == out.bytes(), "reduce_scatter: the output of rank ", rank_, " has ", output.numel(),
                    " elements, and its part of the input has ", inputs[static_cast<size_t>(rank_)].numel());
  own.output = out.data();
  if (size_ == 1) copy_bytes(own.output, own.input, own.bytes);
  request.timeout = timeout;
  request.asynchronous = asynchronous;
  const bool average = request.call.op == ReduceOp::kAverage;
  if (average || out.copied) {
    request.epilogue = [out, output, average, dtype = request.call.dtype, size = size_] {
      if (average) divide(dtype, out.data(), count_of(out.tensor), size);
      if (out.copied) copy_back(output, out.tensor);
    };
  }
  work->keep(out.tensor);
  post(work, std::move(request));
}

Backend::WorkPtr Backend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                         const c10d::ReduceScatterOptions& options) {
  const Tensors& list = single_list(inputs, "reduce_scatter");
  const auto work = make_work(c10d::OpType::REDUCE_SCATTER, "paceline:reduce_scatter", list, outputs);
  add_reduce_scatter(work, single(outputs, "reduce_scatter"), list, options.reduceOp, options.timeout, options.asyncOp);
  return work;
}

Backend::WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                               const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK_VALUE(input.numel() == output.numel() * size_, "reduce_scatter_tensor: the input has ", input.numel(),
                    " elements, and ", size_, " ranks with ", output.numel(), " each need ", output.numel() * size_);
  Tensors inputs{input};
  const auto work = make_work(c10d::OpType::_REDUCE_SCATTER_BASE, "paceline:_reduce_scatter_base", inputs, {output});
  add_reduce_scatter(work, output, parts(input, size_, "reduce_scatter_tensor"), options.reduceOp, options.timeout,
                     options.asyncOp);
  return work;
}

Backend::WorkPtr Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK_VALUE(!inputs.empty() && inputs.size() == outputs.size(),
                    "reduce_scatter_tensor_coalesced needs as many outputs as inputs");
  const auto work = make_work(c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED, "paceline:reduce_scatter", inputs, outputs,
                              inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    add_reduce_scatter(work, outputs[i], parts(inputs[i], size_, "reduce_scatter_tensor_coalesced"), options.reduceOp,
                       options.timeout, options.asyncOp);
  }
  return work;
}

Backend::WorkPtr Backend::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const at::Tensor& input = single(inputs, "gather");
  check_root(options.rootRank, "gather");
  const bool root = rank_ == options.rootRank;
  TORCH_CHECK_VALUE(root || outputs.empty() || outputs.front().empty(),
                    "gather takes output tensors at the root only, and rank ", rank_, " is not the root");
  const Contiguous in = contiguous(input);
  Request request;
  request.call = {
      Kind::kGather, dtype_of(input), ReduceOp::kSum, 0, static_cast<int32_t>(options.rootRank), count_of(input), 0};
  request.bytes = in.bytes() * static_cast<uint64_t>(size_);
  request.blocks.assign(static_cast<size_t>(size_), {nullptr, nullptr, in.bytes()});
  Tensors results;
  std::vector<Contiguous> outs;
  if (root) {
    results = single_list(outputs, "gather");
    TORCH_CHECK_VALUE(results.size() == static_cast<size_t>(size_), "gather needs ", size_,
                      " output tensors at the root, not ", results.size());
    for (size_t i = 0; i < results.size(); ++i) {
      check_same_type(input, results[i], "gather");
      TORCH_CHECK_VALUE(results[i].numel() == input.numel(), "gather: output tensor ", i, " has ", results[i].numel(),
                        " elements, and the input has ", input.numel());
      outs.push_back(contiguous(results[i]));
      request.blocks[i].output = outs.back().data();
    }
    copy_bytes(outs[static_cast<size_t>(rank_)].data(), in.data(), in.bytes());
    request.epilogue = [outs, results] {
      for (size_t i = 0; i < outs.size(); ++i) {
        if (outs[i].copied) copy_back(results[i], outs[i].tensor);
      }
    };
  }
  request.blocks[static_cast<size_t>(rank_)].input = in.data();
  request.timeout = options.timeout;
  request.asynchronous = options.asyncOp;
  return exchange(c10d::OpType::GATHER, "paceline:gather", {in.tensor}, std::move(results), std::move(request));
}

Backend::WorkPtr Backend::scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) {
  at::Tensor output = single(outputs, "scatter");
  check_root(options.rootRank, "scatter");
  const bool root = rank_ == options.rootRank;
  TORCH_CHECK_VALUE(root || inputs.empty() || inputs.front().empty(),
                    "scatter takes input tensors at the root only, and rank ", rank_, " is not the root");
  const Contiguous out = contiguous(output);
  Request request;
  request.call = {
      Kind::kScatter, dtype_of(output), ReduceOp::kSum, 0, static_cast<int32_t>(options.rootRank), count_of(output), 0};
  request.bytes = out.bytes() * static_cast<uint64_t>(size_);
  request.blocks.assign(static_cast<size_t>(size_), {nullptr, nullptr, out.bytes()});
  request.blocks[static_cast<size_t>(rank_)].output = out.data();
  Tensors kept{out.tensor};
  if (root) {
    const Tensors& list = single_list(inputs, "scatter");
    TORCH_CHECK_VALUE(list.size() == static_cast<size_t>(size_), "scatter needs ", size_,
                      " input tensors at the root, not ", list.size());
    for (size_t i = 0; i < list.size(); ++i) {
      check_same_type(list[i], output, "scatter");
      TORCH_CHECK_VALUE(list[i].numel() == output.numel(), "scatter: input tensor ", i, " has ", list[i].numel(),
                        " elements, and the output has ", output.numel());
      kept.push_back(contiguous(list[i]).tensor);
      request.blocks[i].input = static_cast<const uint8_t*>(kept.back().data_ptr());
    }
    copy_bytes(out.data(), request.blocks[static_cast<size_t>(rank_)].input, out.bytes());
  }
  request.timeout = options.timeout;
  request.asynchronous = options.asyncOp;
  if (out.copied) request.epilogue = [out, output]() mutable { copy_back(output, out.tensor); };
  return exchange(c10d::OpType::SCATTER, "paceline:scatter", std::move(kept), outputs, std::move(request));
}

Backend::WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  TORCH_CHECK_VALUE(output.is_contiguous() && input.is_contiguous(), "all_to_all_single needs contiguous tensors");
  // Splits count rows; an even split is what an empty list means.
  auto cut = [&](const at::Tensor& tensor, const std::vector<int64_t>& splits, const char* which) {
    const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
    Tensors list;
    if (splits.empty()) {
      TORCH_CHECK_VALUE(rows % size_ == 0, "all_to_all_single: the ", rows, " rows of the ", which,
                        " cannot be shared by ", size_, " ranks equally: pass split sizes");
      const int64_t row = rows == 0 ? 0 : tensor.numel() / rows;
      for (int i = 0; i < size_; ++i) {
        list.push_back(tensor.view({-1}).narrow(0, i * (rows / size_) * row, rows / size_ * row));
      }
      return list;
    }
    TORCH_CHECK_VALUE(splits.size() == static_cast<size_t>(size_), "all_to_all_single needs ", size_, " ", which,
                      " splits, not ", splits.size());
    int64_t begin = 0;
    const int64_t row = rows == 0 ? 0 : tensor.numel() / rows;
    for (const int64_t split : splits) {
      TORCH_CHECK_VALUE(split >= 0 && split <= rows - begin, "all_to_all_single: the ", which,
                        " splits do not add up to its ", rows, " rows");
      list.push_back(tensor.view({-1}).narrow(0, begin * row, split * row));
      begin += split;
    }
    TORCH_CHECK_VALUE(begin == rows, "all_to_all_single: the ", which, " splits add up to ", begin, ", not to its ",
                      rows, " rows");
    return list;
  };
  Tensors outputs = cut(output, output_splits, "output"), inputs = cut(input, input_splits, "input");
  return exchange_all({input}, {output}, outputs, inputs, options);
}

Backend::WorkPtr Backend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  return exchange_all(inputs, outputs, outputs, inputs, options);
}

Backend::WorkPtr Backend::exchange_all(const Tensors& given, const Tensors& results, const Tensors& outputs,
                                       const Tensors& inputs, const c10d::AllToAllOptions& options) {
  const auto n = static_cast<size_t>(size_);
  const auto own = static_cast<size_t>(rank_);
  TORCH_CHECK_VALUE(outputs.size() == n && inputs.size() == n, "all_to_all needs ", size_,
                    " input and output tensors, not ", inputs.size(), " and ", outputs.size());
  Request request;
  request.call = {Kind::kAllToAll, dtype_of(inputs.front()), ReduceOp::kSum, 0, 0, 0, 0};
  // Ranks may differ in sizes: each knows only what it sends and receives, and the choice must not depend on it.
  request.bytes = 1;
  request.blocks.resize(n * n);
  Tensors kept;
  std::vector<Contiguous> outs;
  for (size_t i = 0; i < n; ++i) {
    check_same_type(inputs[i], outputs[i], "all_to_all");
    const Contiguous in = contiguous(inputs[i]);
    outs.push_back(contiguous(outputs[i]));
    kept.push_back(in.tensor);
    kept.push_back(outs.back().tensor);
    Block& sent = request.blocks[own * n + i];
    sent.input = in.data();
    sent.bytes = in.bytes();
    if (i == own) {
      TORCH_CHECK_VALUE(in.bytes() == outs.back().bytes(), "all_to_all: rank ", rank_, " sends itself ",
                        inputs[i].numel(), " elements and receives ", outputs[i].numel());
      copy_bytes(outs.back().data(), in.data(), in.bytes());
    } else {
      Block& received = request.blocks[i * n + own];
      received.output = outs.back().data();
      received.bytes = outs.back().bytes();
    }
  }
  request.timeout = options.timeout;
  request.asynchronous = options.asyncOp;
  if (std::any_of(outs.begin(), outs.end(), [](const Contiguous& out) { return out.copied; })) {
    request.epilogue = [outs, outputs] {
      for (size_t i = 0; i < outs.size(); ++i) {
        if (outs[i].copied) copy_back(outputs[i], outs[i].tensor);
      }
    };
  }
  const auto work = make_work(c10d::OpType::ALLTOALL, "paceline:all_to_all", given, results);
  for (at::Tensor& tensor : kept) work->keep(std::move(tensor));
  post(work, std::move(request));
  return work;
}

Backend::WorkPtr Backend::barrier(const c10d::BarrierOptions& options) {
  Request request;
  request.call = {Kind::kBarrier, DType::kBytes, ReduceOp::kSum, 0, 0, 0, 0};
  request.blocks = {{nullptr, nullptr, 0}};
  request.timeout = options.timeout;
  request.asynchronous = options.asyncOp;
  return exchange(c10d::OpType::BARRIER, "paceline:barrier", {}, {}, std::move(request));
}

Backend::WorkPtr Backend::message(Tensors& tensors, int64_t peer, int tag, bool receives, c10d::OpType type,
                                  const char* title) {
  at::Tensor tensor = single(tensors, title);
  TORCH_CHECK_VALUE(tag >= 0, "a tag is 0 or more, not ", tag);
  TORCH_CHECK_VALUE(peer < size_ && peer != rank_ && (peer >= 0 || type == c10d::OpType::RECVANYSOURCE), title,
                    ": rank ", peer, " is not another rank of this group");
  TORCH_CHECK(!left_, "this process group was destroyed");
  const Contiguous flat = contiguous(tensor);
  const auto work = make_work(type, title, tensors, tensors);
  work->keep(flat.tensor);
  auto message = std::make_shared<Message>();
  message->peer = peer;
  message->tag = static_cast<uint32_t>(tag);
  message->data = flat.data();
  message->bytes = flat.bytes();
  message->timeout = options_->timeout;
  // The message outlives its own callback, and must not keep itself alive.
  message->on_done = [work, flat, tensor, receives, message = message.get()](const std::string& error) mutable {
    if (error.empty() && receives) {
      work->set_source(static_cast<int>(message->peer));
      if (flat.copied) copy_back(tensor, flat.tensor);
    }
    work->done(error);
  };
  if (receives) {
    engine_->receive(group_, message);
  } else {
    engine_->send(group_, message);
  }
  return work;
}

Backend::WorkPtr Backend::send(Tensors& tensors, int to, int tag) {
  return message(tensors, to, tag, false, c10d::OpType::SEND, "paceline:send");
}

Backend::WorkPtr Backend::recv(Tensors& tensors, int from, int tag) {
  return message(tensors, from, tag, true, c10d::OpType::RECV, "paceline:recv");
}

Backend::WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) {
  return message(tensors, -1, tag, true, c10d::OpType::RECVANYSOURCE, "paceline:recvAnySource");
}

std::future<void> Backend::start_message(int64_t peer, uint32_t tag, uint8_t* data, uint64_t bytes, bool receives,
                                         std::chrono::milliseconds timeout) {
  auto promise = std::make_shared<std::promise<void>>();
  auto message = std::make_shared<Message>();
  message->peer = peer;
  message->tag = tag;
  message->data = data;
  message->bytes = bytes;
  message->timeout = timeout;
  message->on_done = [promise](const std::string& error) {
    if (error.empty()) {
      promise->set_value();
    } else {
      promise->set_exception(backend_error(error));
    }
  };
  if (receives) {
    engine_->receive(group_, message);
  } else {
    engine_->send(group_, message);
  }
  return promise->get_future();
}

double Backend::exchange_seconds(int to, int from, uint64_t bytes) {
  std::vector<uint8_t> out(bytes), in(bytes);
  const auto begin = Clock::now();
  std::future<void> received = start_message(from, kExchangeTag, in.data(), bytes, true, options_->timeout);
  start_message(to, kExchangeTag, out.data(), bytes, false, options_->timeout).get();
  received.get();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Rank 0 hears from every rank, and only then answers: so it can say who did not come. The words are Gloo's, since
// programs and PyTorch's own tests look for them.
void Backend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  const std::chrono::milliseconds timeout = timeout_or_default(options.timeout);
  const uint32_t here = kMonitorTag | (monitored_barriers_++ & 0x3fffffff) << 1;
  const uint32_t go_on = here | 1;
  uint8_t byte = 0;
  if (rank_ != 0) {
    try {
      start_message(0, here, &byte, 1, false, timeout).get();
      start_message(0, go_on, &byte, 1, true, timeout).get();
    } catch (const std::exception& error) {
      std::rethrow_exception(backend_error(
          "Rank " + std::to_string(rank_) +
          " successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. "
          "Please check rank 0 logs for faulty rank.\n Original exception: \n" +
          error.what()));
    }
    return;
  }
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::string missing;
  for (int rank = 1; rank < size_; ++rank) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0 && !wait_all_ranks) {
      std::rethrow_exception(backend_error("[Rank 0]: Rank 0 timed out in monitoredBarrier after " +
                                           std::to_string(timeout.count()) + " ms, waiting for rank " +
                                           std::to_string(rank)));
    }
    try {
      start_message(rank, here, &byte, 1, true, std::max(left, std::chrono::milliseconds(1))).get();
    } catch (const std::exception& error) {
      const std::string milliseconds = std::to_string(timeout.count());
      if (!wait_all_ranks) {
        std::rethrow_exception(backend_error("[Rank 0]: Rank " + std::to_string(rank) +
                                             " failed to pass monitoredBarrier in " + milliseconds +
                                             " ms\n Original exception: \n" + error.what()));
      }
      missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
    }
  }
  if (!missing.empty()) {
    std::rethrow_exception(backend_error("[Rank 0]: Ranks " + missing + " failed to pass monitoredBarrier in " +
                                         std::to_string(timeout.count()) + " ms"));
  }
  for (int rank = 1; rank < size_; ++rank) start_message(rank, go_on, &byte, 1, false, timeout).get();
}

}  // namespace paceline
