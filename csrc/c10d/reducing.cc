// The collectives that compute: all_reduce, reduce, reduce_scatter.
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

}  // namespace

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
  if (request.call.op == ReduceOp::kAverage) request.finish.divide(flat, request.call.dtype, size_);
  request.finish.copy(tensor, flat);
  work->keep(flat.tensor);
  post(work, std::move(request));
}

Backend::WorkPtr Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  single(tensors, "all_reduce");
  if (tensors.front().layout() == at::kSparse) return allreduce_sparse(tensors, options);
  const auto work = make_work(c10d::OpType::ALLREDUCE, "paceline:all_reduce", tensors, tensors);
  add_allreduce(work, tensors.front(), options.reduceOp, options.timeout, options.asyncOp);
  return handle(work, options.asyncOp);
}

Backend::WorkPtr Backend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  TORCH_CHECK_VALUE(!tensors.empty(), "all_reduce_coalesced takes at least one tensor");
  const auto work =
      make_work(c10d::OpType::ALLREDUCE_COALESCED, "paceline:all_reduce", tensors, tensors, tensors.size());
  for (const at::Tensor& tensor : tensors)
    add_allreduce(work, tensor, options.reduceOp, options.timeout, options.asyncOp);
  return handle(work, options.asyncOp);
}

// As Gloo has it: every rank learns how many entries each has, then their indices and values, and adds them up. Ranks
// have different numbers of entries, so the parts are gathered in uneven blocks.
Backend::WorkPtr Backend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = single(tensors, "all_reduce");
  TORCH_CHECK_VALUE(options.reduceOp == c10d::ReduceOp::SUM, "a sparse all_reduce can only sum");
  const auto work = make_work(c10d::OpType::_ALLREDUCE_SPARSE, "paceline:sparse_all_reduce", tensors, tensors);
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
  if (root && request.call.op == ReduceOp::kAverage) request.finish.divide(flat, request.call.dtype, size_);
  if (root) request.finish.copy(tensor, flat);
  return exchange(c10d::OpType::REDUCE, "paceline:reduce", {flat.tensor}, tensors, std::move(request));
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
  if (request.call.op == ReduceOp::kAverage) request.finish.divide(out, request.call.dtype, size_);
  request.finish.copy(output, out);
  work->keep(out.tensor);
  post(work, std::move(request));
}

Backend::WorkPtr Backend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                         const c10d::ReduceScatterOptions& options) {
  const Tensors& list = single(inputs, "reduce_scatter");
  const auto work = make_work(c10d::OpType::REDUCE_SCATTER, "paceline:reduce_scatter", list, outputs);
  add_reduce_scatter(work, single(outputs, "reduce_scatter"), list, options.reduceOp, options.timeout, options.asyncOp);
  return handle(work, options.asyncOp);
}

Backend::WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                               const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK_VALUE(input.numel() == output.numel() * size_, "reduce_scatter_tensor: the input has ", input.numel(),
                    " elements, and ", size_, " ranks with ", output.numel(), " each need ", output.numel() * size_);
  const Tensors inputs{input};
  const auto work = make_work(c10d::OpType::_REDUCE_SCATTER_BASE, "paceline:_reduce_scatter_base", inputs, {output});
  add_reduce_scatter(work, output, parts(input, size_, "reduce_scatter_tensor"), options.reduceOp, options.timeout,
                     options.asyncOp);
  return handle(work, options.asyncOp);
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
  return handle(work, options.asyncOp);
}

}  // namespace paceline
