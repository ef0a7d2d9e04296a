// The collectives that only move: broadcast, all_gather, gather, scatter, all_to_all, barrier.
#include "c10d/arguments.h"
#include "c10d/backend.h"

namespace paceline {

Backend::WorkPtr Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor tensor = single(tensors, "broadcast");
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
  if (rank_ != options.rootRank) request.finish.copy(tensor, flat);
  return exchange(c10d::OpType::BROADCAST, "paceline:broadcast", {flat.tensor}, tensors, std::move(request));
}

void Backend::add_allgather(const c10::intrusive_ptr<Work>& work, const Tensors& outputs, const at::Tensor& input,
                            std::chrono::milliseconds timeout, bool asynchronous) {
  TORCH_CHECK_VALUE(outputs.size() == static_cast<size_t>(size_), "all_gather needs ", size_,
                    " output tensors, one a rank, not ", outputs.size());
  const Contiguous in = contiguous(input);
  Request request;
  request.call = {Kind::kAllGather, dtype_of(input), ReduceOp::kSum, 0, 0, 0, 0};
  for (const at::Tensor& output : outputs) {
    check_same_type(input, output, "all_gather");
    const Contiguous out = contiguous(output);
    request.call.count += count_of(output);
    request.bytes += out.bytes();
    request.blocks.push_back({nullptr, out.data(), out.bytes()});
    request.finish.copy(output, out);
    work->keep(out.tensor);
  }
  Block& own = request.blocks[static_cast<size_t>(rank_)];
  TORCH_CHECK_VALUE(own.bytes == in.bytes(), "all_gather: the input of rank ", rank_, " has ", input.numel(),
                    " elements, and its output tensor has ", outputs[static_cast<size_t>(rank_)].numel());
  own.input = in.data();
  copy_bytes(own.output, in.data(), own.bytes);
  request.timeout = timeout;
  request.asynchronous = asynchronous;
  work->keep(in.tensor);
  post(work, std::move(request));
}

Backend::WorkPtr Backend::allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const Tensors& list = single(outputs, "all_gather");
  const auto work = make_work(c10d::OpType::ALLGATHER, "paceline:all_gather", inputs, list);
  add_allgather(work, list, single(inputs, "all_gather"), options.timeout, options.asyncOp);
  return handle(work, options.asyncOp);
}

Backend::WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::AllgatherOptions& options) {
  TORCH_CHECK_VALUE(output.numel() == input.numel() * size_, "all_gather_into_tensor: the output has ", output.numel(),
                    " elements, and ", size_, " ranks with ", input.numel(), " each give ", input.numel() * size_);
  const Tensors inputs{input};
  const auto work = make_work(c10d::OpType::_ALLGATHER_BASE, "paceline:_all_gather_base", inputs, {output});
  add_allgather(work, parts(output, size_, "all_gather_into_tensor"), input, options.timeout, options.asyncOp);
  return handle(work, options.asyncOp);
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
  return handle(work, options.asyncOp);
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
  return handle(work, options.asyncOp);
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
    results = single(outputs, "gather");
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
    for (size_t i = 0; i < outs.size(); ++i) request.finish.copy(results[i], outs[i]);
  }
  request.blocks[static_cast<size_t>(rank_)].input = in.data();
  request.timeout = options.timeout;
  request.asynchronous = options.asyncOp;
  return exchange(c10d::OpType::GATHER, "paceline:gather", {in.tensor}, std::move(results), std::move(request));
}

Backend::WorkPtr Backend::scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) {
  const at::Tensor output = single(outputs, "scatter");
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
    const Tensors& list = single(inputs, "scatter");
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
  request.finish.copy(output, out);
  return exchange(c10d::OpType::SCATTER, "paceline:scatter", std::move(kept), outputs, std::move(request));
}

Backend::WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  TORCH_CHECK_VALUE(output.is_contiguous() && input.is_contiguous(), "all_to_all_single needs contiguous tensors");
  // Splits count rows; an even split is what an empty list means.
  const auto cut = [&](const at::Tensor& tensor, const std::vector<int64_t>& splits, const char* which) {
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
  const Tensors outputs = cut(output, output_splits, "output"), inputs = cut(input, input_splits, "input");
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
  for (size_t i = 0; i < n; ++i) request.finish.copy(outputs[i], outs[i]);
  const auto work = make_work(c10d::OpType::ALLTOALL, "paceline:all_to_all", given, results);
  for (at::Tensor& tensor : kept) work->keep(std::move(tensor));
  post(work, std::move(request));
  return handle(work, options.asyncOp);
}

Backend::WorkPtr Backend::barrier(const c10d::BarrierOptions& options) {
  Request request;
  request.call = {Kind::kBarrier, DType::kBytes, ReduceOp::kSum, 0, 0, 0, 0};
  request.blocks = {{nullptr, nullptr, 0}};
  request.timeout = options.timeout;
  request.asynchronous = options.asyncOp;
  return exchange(c10d::OpType::BARRIER, "paceline:barrier", {}, {}, std::move(request));
}

}  // namespace paceline
