// The c10d backend "paceline": translates what torch.distributed asks into operations of the engine. It decides
// nothing: which schedule runs a collective is the planner's business, which is Python.
#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <tuple>
#include <vector>

#include "c10d/buffers.h"
#include "c10d/programs.h"
#include "c10d/work.h"
#include "engine/engine.h"

namespace paceline {

// Sends to one rank and receives from another; seconds until both are done.
using Exchange = std::function<double(int to, int from, uint64_t bytes)>;

class Backend final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  struct Settings {
    std::shared_ptr<Engine> engine;
    std::chrono::milliseconds timeout{0};
    std::string host;
    // What this process knows of the links from groups before, to be used if this rank is the group's rank 0.
    std::function<std::string()> known_links;
    // Makes the planner of a group when all have met. `links` is what its rank 0 knew of them.
    std::function<Plans(int rank, const c10::intrusive_ptr<c10d::Store>& store, const std::vector<std::string>& hosts,
                        const std::string& links, const Exchange& exchange)>
        make_planner;
  };

  Backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Settings settings);
  ~Backend() override;

  const std::string getBackendName() const override { return "paceline"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& options) override;

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  // Why the group has failed, or an empty string.
  std::string failure() { return engine_->failure(group_); }
  // Which algorithm runs each kind of request so far: "allreduce of 64 MiB: ring".
  std::vector<std::string> chosen() { return programs_->chosen(); }
  // Who arrived when at each collective that awaited a decision; empty but on rank 0.
  std::vector<Decisions::Record> arrivals() { return engine_->arrivals(group_); }

 private:
  // A collective about to be posted.
  struct Request {
    Call call;
    std::vector<Block> blocks;
    uint64_t bytes = 0;  // of the whole buffer, the same on all ranks
    std::chrono::milliseconds timeout{0};
    bool asynchronous = true;  // the caller goes on instead of waiting at once
    Finish finish;
  };

  // Once. Returns what ranks disagree about, if no caller of this rank was told.
  std::string leave();
  PlanRequest wanted(const Request& request) const;
  void post(const c10::intrusive_ptr<Work>& work, Request request);
  WorkPtr exchange(c10d::OpType type, const char* title, Tensors inputs, Tensors outputs, Request request);
  // From every part of `inputs` to a part of `outputs`; `given` and `results` are what the caller passed.
  WorkPtr exchange_all(const Tensors& given, const Tensors& results, const Tensors& outputs, const Tensors& inputs,
                       const c10d::AllToAllOptions& options);
  void add_allreduce(const c10::intrusive_ptr<Work>& work, const at::Tensor& tensor, const c10d::ReduceOp& op,
                     std::chrono::milliseconds timeout, bool asynchronous);
  void add_allgather(const c10::intrusive_ptr<Work>& work, const Tensors& outputs, const at::Tensor& input,
                     std::chrono::milliseconds timeout, bool asynchronous);
  void add_reduce_scatter(const c10::intrusive_ptr<Work>& work, const at::Tensor& output, const Tensors& inputs,
                          const c10d::ReduceOp& op, std::chrono::milliseconds timeout, bool asynchronous);
  WorkPtr message(Tensors& tensors, int64_t peer, int tag, bool receives, c10d::OpType type, const char* title);
  // Returns at once; `get` of what it returns waits, and throws what went wrong.
  std::future<void> start_message(int64_t peer, uint32_t tag, uint8_t* data, uint64_t bytes, bool receives,
                                  std::chrono::milliseconds timeout);
  double exchange_seconds(int to, int from, uint64_t bytes);
  c10::intrusive_ptr<Work> make_work(c10d::OpType type, const char* title, const Tensors& inputs, Tensors outputs,
                                     size_t parts = 1);
  std::chrono::milliseconds timeout_or_default(std::chrono::milliseconds timeout) const;
  void check_root(int64_t root, const char* operation) const;

  Settings settings_;
  c10::intrusive_ptr<Options> options_;
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Group> group_;
  Waiting waiting_;
  std::shared_ptr<Programs> programs_;
  uint64_t least_awaiting_bytes_ = UINT64_MAX;  // all-reduces from this size on await a decision
  std::atomic<uint64_t> sequence_{0};
  uint32_t monitored_barriers_ = 0;
  std::atomic<bool> left_{false};
};

}  // namespace paceline
