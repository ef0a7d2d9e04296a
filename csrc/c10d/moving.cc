// The collectives that only move: broadcast, all_gather, gather, scatter, all_to_all, barrier.
#include "c10d/arguments.h"
#include "c10d/backend.h"

namespace paceline {

Backend::WorkPtr Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const Recording recording("paceline:broadcast", tensors);
  const at::Tensor& tensor = single(tensors, "broadcast");
  check_root(options.rootRank, options.rootTensor, "broadcast");
  check_writable(tensor, "broadcast");
  const bool root = rank_ == options.rootRank;
  Footprint footprint;
  root ? footprint.reads(tensor) : footprint.writes(tensor);
  await_memory(footprint);
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
  if (!root) request.finish.copy(tensor, flat);
  const auto work = make_work(c10d::OpType::BROADCAST, tensors);
  work->keep(flat.tensor);
  return run(work, std::move(request), footprint, manner(options));
}

Backend::Request Backend::request_allgather(Work& work, const Tensors& outputs, const at::Tensor& input) const {
  const Contiguous in = contiguous(input);
  Request request;
  request.call = {Kind::kAllGather, dtype_of(input), ReduceOp::kSum, 0, 0, 0, 0};
  for (size_t i = 0; i < outputs.size(); ++i) {
    check_same_type(input, outputs[i], i, "all_gather");
    const Contiguous out = writable(outputs[i], "all_gather");
    request.call.count += count_of(outputs[i]);
    request.bytes += out.bytes();
    request.blocks.push_back({nullptr, out.data(), out.bytes()});
    request.finish.copy(outputs[i], out);
    work.keep(out.tensor);
  }
  const auto rank = static_cast<size_t>(rank_);
  check_same_elements(input, outputs[rank], rank, "all_gather");
  Block& own = request.blocks[rank];
  own.input = in.data();
  copy_bytes(own.output, in.data(), own.bytes);
  work.keep(in.tensor);
  return request;
}

Backend::WorkPtr Backend::allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const Recording recording("paceline:all_gather", inputs);
  single(inputs, "all_gather");
  return gather_lists(c10d::OpType::ALLGATHER, {single(outputs, "all_gather")}, inputs, manner(options));
}

Backend::WorkPtr Backend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) {
  const Recording recording("paceline:all_gather", inputs);
  TORCH_CHECK(!inputs.empty(), "all_gather_coalesced requires a non-empty input tensor list");
  // c10d has two orders for the lists: one list a rank (each with every input), or one list an input.
  const bool by_rank = outputs.size() == static_cast<size_t>(size_) && outputs.front().size() == inputs.size();
  TensorLists by_input(by_rank ? inputs.size() : 0);
  for (size_t rank = 0; by_rank && rank < outputs.size(); ++rank) {
    TORCH_CHECK(outputs[rank].size() == inputs.size(),
                "all_gather_coalesced: invalid output size: ", "(expected length ", inputs.size(), ", got ",
                outputs[rank].size(), ")");
    for (size_t i = 0; i < inputs.size(); ++i) by_input[i].push_back(outputs[rank][i]);
  }
  return gather_lists(c10d::OpType::ALLGATHER_COALESCED, by_rank ? by_input : outputs, inputs, manner(options));
}

Backend::WorkPtr Backend::gather_lists(c10d::OpType type, const TensorLists& lists, const Tensors& inputs,
                                       const Manner& manner) {
  TORCH_CHECK(lists.size() == inputs.size(),
              "all_gather requires input/output tensor lists to have the same length, not ", inputs.size(), " and ",
              lists.size());
  Footprint footprint;
  Tensors results;
  for (size_t i = 0; i < lists.size(); ++i) {
    TORCH_CHECK(lists[i].size() == static_cast<size_t>(size_), "all_gather: invalid output tensor list at index ", i,
                " (expected length ", size_, ", got ", lists[i].size(), ")");
    footprint.writes(lists[i]);
    if (!in_place(lists[i][static_cast<size_t>(rank_)], inputs[i])) footprint.reads(inputs[i]);
    results.insert(results.end(), lists[i].begin(), lists[i].end());
  }
  return gather_all(type, lists, inputs, std::move(results), footprint, manner);
}

Backend::WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::AllgatherOptions& options) {
  const Tensors inputs{input};
  const Recording recording("paceline:_all_gather_base", inputs);
  return gather_tensors(c10d::OpType::_ALLGATHER_BASE, {output}, inputs, manner(options));
}

Backend::WorkPtr Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::AllgatherOptions& options) {
  const Recording recording("paceline:all_gather", inputs);
  TORCH_CHECK(!inputs.empty() && inputs.size() == outputs.size(),
              "all_gather_into_tensor_coalesced requires input/output tensor lists to have the same length");
  return gather_tensors(c10d::OpType::ALLGATHER_COALESCED, outputs, inputs, manner(options));
}

Backend::WorkPtr Backend::gather_tensors(c10d::OpType type, const Tensors& outputs, const Tensors& inputs,
                                         const Manner& manner) {
  Footprint footprint;
  TensorLists lists;
  for (size_t i = 0; i < inputs.size(); ++i) {
    TORCH_CHECK(outputs[i].numel() == inputs[i].numel() * size_,
                "all_gather_into_tensor: invalid tensor size: ", "the output has ", outputs[i].numel(),
                " elements, and ", size_, " ranks with ", inputs[i].numel(), " each give ", inputs[i].numel() * size_);
    lists.push_back(parts(outputs[i], size_, "all_gather_into_tensor"));
    footprint.writes(outputs[i]);
    if (!in_place(lists[i][static_cast<size_t>(rank_)], inputs[i])) footprint.reads(inputs[i]);
  }
  return gather_all(type, std::move(lists), inputs, outputs, footprint, manner);
}

Backend::WorkPtr Backend::gather_all(c10d::OpType type, TensorLists lists, const Tensors& inputs, Tensors results,
                                     const Footprint& footprint, const Manner& manner) {
  await_memory(footprint);
  const auto work = make_work(type, std::move(results), inputs.size());
  if (footprint.overlaps_itself()) {
    for (size_t rank = 0; rank < static_cast<size_t>(size_); ++rank) {  // in Gloo's order
      for (Tensors& list : lists) list[rank] = apart(*work, list[rank], "all_gather");
    }
  }
  std::vector<Request> requests;
  requests.reserve(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) requests.push_back(request_allgather(*work, lists[i], inputs[i]));
  return run(work, std::move(requests), footprint, manner);
}

Backend::WorkPtr Backend::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const Recording recording("paceline:gather", inputs);
  const at::Tensor& input = single(inputs, "gather");
  check_root(options.rootRank, 0, "gather");
  const bool root = rank_ == options.rootRank;
  TORCH_CHECK(root || outputs.empty() || outputs.front().empty(), "gather requires empty output on non-root, and rank ",
              rank_, " is not the root");
  Tensors results;
  Footprint footprint;
  if (root) {
    results = single(outputs, "gather");
    TORCH_CHECK(results.size() == static_cast<size_t>(size_), "gather: Incorrect output list size ", results.size(),
                ". Output list size should be ", size_, ", same as size of the process group.");
    for (size_t i = 0; i < results.size(); ++i) {
      check_same_type(input, results[i], i, "gather");
      check_same_elements(input, results[i], i, "gather");
    }
    footprint.writes(results);
  }
  if (!root || !in_place(results[static_cast<size_t>(rank_)], input)) footprint.reads(input);
  await_memory(footprint);
  const auto work = make_work(c10d::OpType::GATHER, results);
  const Contiguous in = contiguous(input);
  Request request;
  request.call = {
      Kind::kGather, dtype_of(input), ReduceOp::kSum, 0, static_cast<int32_t>(options.rootRank), count_of(input), 0};
  request.bytes = in.bytes() * static_cast<uint64_t>(size_);
  request.blocks.assign(static_cast<size_t>(size_), {nullptr, nullptr, in.bytes()});
  const bool shared = footprint.overlaps_itself();
  for (size_t i = 0; i < results.size(); ++i) {
    const at::Tensor result = shared ? apart(*work, results[i], "gather") : results[i];
    const Contiguous out = writable(result, "gather");
    request.blocks[i].output = out.data();
    request.finish.copy(result, out);
    work->keep(out.tensor);
  }
  Block& own = request.blocks[static_cast<size_t>(rank_)];
  own.input = in.data();
  if (root) copy_bytes(own.output, own.input, own.bytes);
  work->keep(in.tensor);
  return run(work, std::move(request), footprint, manner(options));
}

Backend::WorkPtr Backend::scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) {
  const at::Tensor& output = single(outputs, "scatter");
  check_root(options.rootRank, 0, "scatter");
  const bool root = rank_ == options.rootRank;
  TORCH_CHECK(root || inputs.empty() || inputs.front().empty(), "scatter requires empty input on non-root, and rank ",
              rank_, " is not the root");
  const Tensors list = root ? single(inputs, "scatter") : Tensors{};
  const Recording recording("paceline:scatter", root ? list : outputs);
  Footprint footprint;
  footprint.writes(output);
  if (root) {
    TORCH_CHECK(list.size() == static_cast<size_t>(size_), "scatter: Incorrect input list size ", list.size(),
                ". Input list size should be ", size_, ", same as size of the process group.");
    for (size_t i = 0; i < list.size(); ++i) {
      check_same_type(output, list[i], i, "scatter");
      check_same_elements(output, list[i], i, "scatter");
      if (i != static_cast<size_t>(rank_) || !in_place(output, list[i])) footprint.reads(list[i]);
    }
  }
  await_memory(footprint);
  const auto work = make_work(c10d::OpType::SCATTER, outputs);
  const at::Tensor result = footprint.overlaps_itself() ? apart(*work, output, "scatter") : output;
  const Contiguous out = writable(result, "scatter");
  Request request;
  request.call = {
      Kind::kScatter, dtype_of(output), ReduceOp::kSum, 0, static_cast<int32_t>(options.rootRank), count_of(output), 0};
  request.bytes = out.bytes() * static_cast<uint64_t>(size_);
  request.blocks.assign(static_cast<size_t>(size_), {nullptr, nullptr, out.bytes()});
  for (size_t i = 0; i < list.size(); ++i) {
    const Contiguous in = contiguous(list[i]);
    request.blocks[i].input = in.data();
    work->keep(in.tensor);
  }
  Block& own = request.blocks[static_cast<size_t>(rank_)];
  own.output = out.data();
  if (root) copy_bytes(own.output, own.input, own.bytes);
  request.finish.copy(result, out);
  work->keep(out.tensor);
  return run(work, std::move(request), footprint, manner(options));
}

Backend::WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  const Recording recording("paceline:all_to_all", {input});
  TORCH_CHECK(output.is_contiguous() && input.is_contiguous(), "all_to_all_single needs contiguous tensors");
  // Splits count rows; an even split is what an empty list means.
  const auto cut = [&](const at::Tensor& tensor, const std::vector<int64_t>& splits, const char* which) {
    const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
    Tensors list;
    if (splits.empty()) {
      TORCH_CHECK(rows % size_ == 0, "all_to_all_single: the ", rows, " rows of the ", which, " cannot be shared by ",
                  size_, " ranks equally: pass split sizes");
      const int64_t row = rows == 0 ? 0 : tensor.numel() / rows;
      for (int i = 0; i < size_; ++i) {
        list.push_back(tensor.view({-1}).narrow(0, i * (rows / size_) * row, rows / size_ * row));
      }
      return list;
    }
    TORCH_CHECK(splits.size() == static_cast<size_t>(size_), "all_to_all_single needs ", size_, " ", which,
                " splits, not ", splits.size());
    int64_t begin = 0;
    const int64_t row = rows == 0 ? 0 : tensor.numel() / rows;
    for (const int64_t split : splits) {
      TORCH_CHECK(split >= 0 && split <= rows - begin, "all_to_all_single: the ", which,
                  " splits do not add up to its ", rows, " rows");
      list.push_back(tensor.view({-1}).narrow(0, begin * row, split * row));
      begin += split;
    }
    TORCH_CHECK(begin == rows, "all_to_all_single: the ", which, " splits add up to ", begin, ", not to its ", rows,
                " rows");
    return list;
  };
  const Tensors outputs = cut(output, output_splits, "output"), inputs = cut(input, input_splits, "input");
  Footprint footprint;
  footprint.writes(output);
  footprint.reads(input);
  return exchange_all({output}, outputs, inputs, footprint, manner(options));
}

Backend::WorkPtr Backend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  const Recording recording("paceline:all_to_all", inputs);
  Footprint footprint;
  footprint.writes(outputs);
  footprint.reads(inputs);
  return exchange_all(outputs, outputs, inputs, footprint, manner(options));
}

Backend::WorkPtr Backend::exchange_all(const Tensors& results, const Tensors& outputs, const Tensors& inputs,
                                       const Footprint& footprint, const Manner& manner) {
  const auto n = static_cast<size_t>(size_);
  const auto own = static_cast<size_t>(rank_);
  TORCH_CHECK(outputs.size() == n && inputs.size() == n, "all_to_all needs ", size_, " input and output tensors, not ",
              inputs.size(), " and ", outputs.size());
  for (size_t i = 0; i < n; ++i) {
    check_same_type(inputs.front(), inputs[i], i, "all_to_all");
    check_same_type(inputs.front(), outputs[i], i, "all_to_all");
  }
  check_same_elements(inputs[own], outputs[own], own, "all_to_all");
  await_memory(footprint);
  const auto work = make_work(c10d::OpType::ALLTOALL, results);
  const bool shared = footprint.overlaps_itself();
  Request request;
  request.call = {Kind::kAllToAll, dtype_of(inputs.front()), ReduceOp::kSum, 0, 0, 0, 0};
  // Ranks may differ in sizes: each knows only what it sends and receives, and the choice must not depend on it.
  request.bytes = 1;
  request.blocks.resize(n * n);
  for (size_t i = 0; i < n; ++i) {
    const at::Tensor output = shared ? apart(*work, outputs[i], "all_to_all") : outputs[i];
    const Contiguous in = contiguous(inputs[i]), out = writable(output, "all_to_all");
    Block& sent = request.blocks[own * n + i];
    sent.input = in.data();
    sent.bytes = in.bytes();
    if (i == own) {
      copy_bytes(out.data(), in.data(), in.bytes());
    } else {
      Block& received = request.blocks[i * n + own];
      received.output = out.data();
      received.bytes = out.bytes();
    }
    request.finish.copy(output, out);
    work->keep(in.tensor);
    work->keep(out.tensor);
  }
  return run(work, std::move(request), footprint, manner);
}

Backend::WorkPtr Backend::barrier(const c10d::BarrierOptions& options) {
  const Recording recording("paceline:barrier", {});
  Request request;
  request.call = {Kind::kBarrier, DType::kBytes, ReduceOp::kSum, 0, 0, 0, 0};
  request.blocks = {{nullptr, nullptr, 0}};
  return run(make_work(c10d::OpType::BARRIER, {}), std::move(request), {}, manner(options));
}

}  // namespace paceline
