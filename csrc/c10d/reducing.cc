// The collectives that compute: all_reduce, reduce, reduce_scatter.
#include <algorithm>

#include "c10d/arguments.h"
#include "c10d/backend.h"

namespace paceline {
namespace {

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
      TORCH_CHECK(false, "this reduce operation is not known to the paceline backend");
  }
}

double factor_of(const c10d::ReduceOp& op) {
  const auto* supplement = dynamic_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK(supplement != nullptr, "PREMUL_SUM needs a factor: make it with _make_nccl_premul_sum");
  return supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>() : supplement->double_factor;
}

// Complex numbers are added as pairs of real ones.
at::Tensor as_real(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  const bool adds =
      op.op_ == c10d::ReduceOp::SUM || op.op_ == c10d::ReduceOp::AVG || op.op_ == c10d::ReduceOp::PREMUL_SUM;
  return tensor.is_complex() && adds ? at::view_as_real(tensor) : tensor;
}

void check_reducible(const at::Tensor& tensor, ReduceOp op) {
  TORCH_CHECK(find_reduction(dtype_of(tensor), op) != nullptr, "the paceline backend cannot compute ", name(op), " of ",
              tensor.scalar_type());
}

}  // namespace

Backend::Request Backend::request_allreduce(Work& work, const at::Tensor& any, const c10d::ReduceOp& op,
                                            int num_ranks) {
  const at::Tensor tensor = as_real(any, op);
  const Contiguous flat = writable(tensor, "all_reduce");
  Request request;
  request.call = {Kind::kAllReduce, dtype_of(tensor), op_of(op), 0, 0, count_of(tensor), 0};
  check_reducible(tensor, request.call.op);
  request.bytes = flat.bytes();
  request.blocks = {{flat.data(), flat.data(), flat.bytes()}};
  if (op.op_ == c10d::ReduceOp::PREMUL_SUM) {
    multiply(request.call.dtype, flat.data(), flat.data(), request.call.count, factor_of(op));
  }
  if (request.call.op == ReduceOp::kAverage) request.finish.divide(flat, request.call.dtype, num_ranks);
  request.finish.copy(tensor, flat);
  work.keep(flat.tensor);
  return request;
}

Backend::WorkPtr Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = single(tensors, "all_reduce");
  if (tensor.layout() == at::kSparse) return allreduce_sparse(tensors, options);
  const Recording recording("paceline:all_reduce", tensors);
  Footprint footprint;
  footprint.writes(tensor);
  await_memory(footprint);
  const auto work = make_work(c10d::OpType::ALLREDUCE, tensors);
  return run(work, request_allreduce(*work, tensor, options.reduceOp, size_), footprint, manner(options));
}

Backend::WorkPtr Backend::partial_allreduce(at::Tensor& tensor, std::vector<int64_t> members, uint64_t number,
                                            const c10d::ReduceOp& op, std::chrono::milliseconds timeout,
                                            bool asynchronous) {
  const Tensors tensors{tensor};
  single(tensors, "partial_all_reduce");
  std::sort(members.begin(), members.end());
  const bool twice = std::adjacent_find(members.begin(), members.end()) != members.end();
  TORCH_CHECK(!members.empty() && members.front() >= 0 && members.back() < size_ && !twice,
              "partial_all_reduce: members are ranks of the group, 0 to ", size_ - 1, ", each once");
  TORCH_CHECK(std::binary_search(members.begin(), members.end(), rank_), "partial_all_reduce: rank ", rank_,
              " calls it, and is not one of the members");
  TORCH_CHECK(number < kFirstOfTeams, "partial_all_reduce: numbers are below 2^63");
  const Recording recording("paceline:partial_all_reduce", tensors);
  Footprint footprint;
  footprint.writes(tensor);
  await_memory(footprint);
  const auto work = make_work(c10d::OpType::ALLREDUCE, tensors);
  Request request = request_allreduce(*work, tensor, op, static_cast<int>(members.size()));
  request.number = kFirstOfTeams + number;
  request.members.assign(members.begin(), members.end());
  return run(work, std::move(request), footprint, {timeout, asynchronous});
}

void Backend::give_up(uint64_t number, const std::string& reason) {
  engine_->give_up(group_, kFirstOfTeams + number, reason);
}

Backend::WorkPtr Backend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  const Recording recording("paceline:all_reduce", tensors);
  TORCH_CHECK(!tensors.empty(), "all_reduce_coalesced requires a non-empty tensor list");
  Footprint footprint;
  for (size_t i = 0; i < tensors.size(); ++i) {
    check_same_type(tensors.front(), tensors[i], i, "all_reduce_coalesced: tensors must all have the same type");
    footprint.writes(tensors[i]);
  }
  await_memory(footprint);
  const auto work = make_work(c10d::OpType::ALLREDUCE_COALESCED, tensors, tensors.size());
  std::vector<Request> requests;
  const bool shared = footprint.overlaps_itself();
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor result = shared ? apart(*work, tensor, "all_reduce_coalesced") : tensor;
    requests.push_back(request_allreduce(*work, result, options.reduceOp, size_));
  }
  return run(work, std::move(requests), footprint, manner(options));
}

// As Gloo has it: every rank learns how many entries each has, then their indices and values, and adds them up. Ranks
// have different numbers of entries, so the parts are gathered in uneven blocks.
Backend::WorkPtr Backend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = single(tensors, "all_reduce");
  TORCH_CHECK(options.reduceOp == c10d::ReduceOp::SUM, "a sparse all_reduce can only sum");
  const Recording recording("paceline:sparse_all_reduce", tensors);
  const auto work = make_work(c10d::OpType::_ALLREDUCE_SPARSE, tensors);
  const at::Tensor coalesced = tensor.coalesce();
  const at::Tensor indices = coalesced.indices().t().contiguous();
  const at::Tensor values = coalesced.values().contiguous();
  Tensors counts(static_cast<size_t>(size_));
  for (at::Tensor& count : counts) count = at::empty({1}, at::kLong);
  TensorLists count_list{counts};
  Tensors own{at::full({1}, coalesced._nnz(), at::kLong)};
  c10d::AllgatherOptions gather_options;
  gather_options.timeout = options.timeout;
  // The number of entries decides what is posted next, so this part blocks; the rest need not.
  allgather(count_list, own, gather_options)->wait();
  const auto all_indices = std::make_shared<Tensors>();
  const auto all_values = std::make_shared<Tensors>();
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
  const at::Tensor sum =
      at::sparse_coo_tensor(at::cat(*all_indices).t(), at::cat(*all_values), tensor.sizes()).coalesce();
  tensor.copy_(sum);
  work->done("");
  return work;
}

Backend::WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const Recording recording("paceline:reduce", tensors);
  const at::Tensor tensor = as_real(single(tensors, "reduce"), options.reduceOp);
  check_root(options.rootRank, options.rootTensor, "reduce");
  check_writable(tensor, "reduce");
  const bool root = rank_ == options.rootRank;
  Footprint footprint;
  root ? footprint.writes(tensor) : footprint.reads(tensor);
  await_memory(footprint);
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
  if (options.reduceOp.op_ == c10d::ReduceOp::PREMUL_SUM) {
    if (!root && !flat.copied) flat = {flat.tensor.clone(), true};  // the tensors of other ranks stay as they are
    multiply(request.call.dtype, flat.data(), flat.data(), request.call.count, factor_of(options.reduceOp));
  }
  request.bytes = flat.bytes();
  request.blocks = {{flat.data(), root ? flat.data() : nullptr, flat.bytes()}};
  if (root && request.call.op == ReduceOp::kAverage) request.finish.divide(flat, request.call.dtype, size_);
  if (root) request.finish.copy(tensor, flat);
  const auto work = make_work(c10d::OpType::REDUCE, tensors);
  work->keep(flat.tensor);
  return run(work, std::move(request), footprint, manner(options));
}

Backend::Request Backend::request_reduce_scatter(Work& work, const at::Tensor& any, const Tensors& inputs,
                                                 const c10d::ReduceOp& op) const {
  const at::Tensor output = as_real(any, op);
  const Contiguous out = writable(output, "reduce_scatter");
  Request request;
  request.call = {Kind::kReduceScatter, dtype_of(output), op_of(op), 0, 0, 0, 0};
  check_reducible(output, request.call.op);
  const bool scaled = op.op_ == c10d::ReduceOp::PREMUL_SUM;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor input = as_real(inputs[i], op);
    check_same_type(output, input, i, "reduce_scatter");
    Contiguous in = contiguous(input);
    if (scaled) {  // the input stays as it is
      in = {in.copied ? in.tensor : in.tensor.clone(), true};
      multiply(request.call.dtype, in.data(), in.data(), count_of(in.tensor), factor_of(op));
    }
    request.call.count += count_of(input);
    request.bytes += in.bytes();
    request.blocks.push_back({in.data(), nullptr, in.bytes()});
    work.keep(in.tensor);
  }
  const auto rank = static_cast<size_t>(rank_);
  check_same_elements(any, inputs[rank], rank, "reduce_scatter");
  Block& own = request.blocks[rank];
  own.output = out.data();
  if (size_ == 1) copy_bytes(own.output, own.input, own.bytes);
  if (request.call.op == ReduceOp::kAverage) request.finish.divide(out, request.call.dtype, size_);
  request.finish.copy(output, out);
  work.keep(out.tensor);
  return request;
}

Backend::WorkPtr Backend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                         const c10d::ReduceScatterOptions& options) {
  const Tensors& list = single(inputs, "reduce_scatter");
  const at::Tensor& output = single(outputs, "reduce_scatter");
  const Recording recording("paceline:reduce_scatter", list);
  TORCH_CHECK(list.size() == static_cast<size_t>(size_), "reduce_scatter: invalid input tensor list size ", list.size(),
              ", must be world size ", size_);
  const bool whole = in_place(output, list[static_cast<size_t>(rank_)]);
  Footprint footprint;
  footprint.writes(output);
  for (size_t i = 0; i < list.size(); ++i) {
    if (!whole || i != static_cast<size_t>(rank_)) footprint.reads(list[i]);
  }
  await_memory(footprint);
  const auto work = make_work(c10d::OpType::REDUCE_SCATTER, outputs);
  const at::Tensor result = footprint.overlaps_itself() ? apart(*work, output, "reduce_scatter") : output;
  return run(work, request_reduce_scatter(*work, result, list, options.reduceOp), footprint, manner(options));
}

Backend::WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                               const c10d::ReduceScatterOptions& options) {
  const Tensors inputs{input};
  const Recording recording("paceline:_reduce_scatter_base", inputs);
  return reduce_scatter_tensors(c10d::OpType::_REDUCE_SCATTER_BASE, {output}, inputs, options);
}

Backend::WorkPtr Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::ReduceScatterOptions& options) {
  const Recording recording("paceline:reduce_scatter", inputs);
  TORCH_CHECK(!inputs.empty() && inputs.size() == outputs.size(),
              "reduce_scatter_tensor_coalesced requires input/output tensor lists to have the same length");
  return reduce_scatter_tensors(c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED, outputs, inputs, options);
}

Backend::WorkPtr Backend::reduce_scatter_tensors(c10d::OpType type, const Tensors& outputs, const Tensors& inputs,
                                                 const c10d::ReduceScatterOptions& options) {
  const auto rank = static_cast<size_t>(rank_);
  Footprint footprint;
  TensorLists lists;
  for (size_t i = 0; i < inputs.size(); ++i) {
    TORCH_CHECK(inputs[i].numel() == outputs[i].numel() * size_,
                "reduce_scatter_tensor: invalid tensor size: ", "the input has ", inputs[i].numel(), " elements, and ",
                size_, " ranks with ", outputs[i].numel(), " each need ", outputs[i].numel() * size_);
    const Tensors& list = lists.emplace_back(parts(inputs[i], size_, "reduce_scatter_tensor"));
    footprint.writes(outputs[i]);
    if (!in_place(outputs[i], list[rank])) {
      footprint.reads(inputs[i]);
      continue;
    }
    for (size_t part = 0; part < list.size(); ++part) {
      if (part != rank) footprint.reads(list[part]);
    }
  }
  await_memory(footprint);
  const auto work = make_work(type, outputs, inputs.size());
  const bool shared = footprint.overlaps_itself();
  std::vector<Request> requests;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor result = shared ? apart(*work, outputs[i], "reduce_scatter_tensor") : outputs[i];
    requests.push_back(request_reduce_scatter(*work, result, lists[i], options.reduceOp));
  }
  return run(work, std::move(requests), footprint, manner(options));
}

}  // namespace paceline
