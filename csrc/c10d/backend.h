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

#include "c10d/arguments.h"
#include "c10d/buffers.h"
#include "c10d/probing.h"
#include "c10d/programs.h"
#include "c10d/work.h"
#include "engine/engine.h"

namespace paceline {

// Sends to one rank and receives from another; seconds until both are done.
using Exchange = std::function<double(int to, int from, uint64_t bytes)>;
// Tries multicast, see probing.h.
using TryMulticast = std::function<std::string(const MulticastWish& wish)>;

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
                        const std::string& links, const Exchange& exchange, const TryMulticast& try_multicast)>
        make_planner;
  };

  Backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Settings settings);
  // Of workers that come and go, each of which has one of `size` places: nobody is met, and peers are introduced one by
  // one. Only operations among some ranks can run. `shared` is what all members know, see rendezvous.h.
  Backend(const std::string& shared, int rank, int size, Settings settings, Planner planner);
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

  // Among some of the ranks, which need not be in order: they alone call it, with the same number, which is below 2^63.
  WorkPtr partial_allreduce(at::Tensor& tensor, std::vector<int64_t> members, uint64_t number, const c10d::ReduceOp& op,
                            std::chrono::milliseconds timeout, bool asynchronous);
  // Ends such an operation on all its members.
  void give_up(uint64_t number, const std::string& reason);

  // Of workers that come and go: where a peer is. One that was lost can come back.
  void introduce(int peer, const std::string& address);

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  // Why the group has failed, or an empty string.
  std::string failure() { return engine_->failure(group_); }
  // Which algorithm runs each kind of request so far: "allreduce of 64 MiB: ring".
  std::vector<std::string> chosen() { return programs_->chosen(); }
  // What went by multicast, if the group has it.
  std::optional<Engine::PacketCounters> packet_counters() { return engine_->packet_counters(group_); }
  // Who arrived when at each collective that awaited a decision; empty but on rank 0.
  std::vector<Decisions::Record> arrivals() { return engine_->arrivals(group_); }

 private:
  // A collective about to be posted.
  struct Request {
    Call call;
    std::vector<Block> blocks;
    uint64_t bytes = 0;  // of the whole buffer, the same on all ranks
    Finish finish;
    uint64_t number = 0;            // of an operation of a team
    std::vector<uint32_t> members;  // of that team, in order
  };

  // How the caller of a collective wants it done: by the options of c10d.
  struct Manner {
    std::chrono::milliseconds timeout{0};
    bool asynchronous = true;  // the caller goes on instead of waiting at once
  };
  template <typename Options>
  static Manner manner(const Options& options) {
    return {options.timeout, options.asyncOp};
  }

  // A collective of this group that was called and may not have ended.
  struct InFlight {
    Footprint footprint;
    c10::weak_intrusive_ptr<Work> work;
  };

  // Once. Returns what ranks disagree about, if no caller of this rank was told.
  std::string leave();
  PlanRequest wanted(const Request& request) const;
  void post(const c10::intrusive_ptr<Work>& work, Request request, const Manner& manner);
  // Posts the parts of a call. Returns its handle; or nothing, after it has ended, where the caller is going to wait at
  // once: to wait here saves a way through Python, which takes longer than a small collective itself.
  WorkPtr run(const c10::intrusive_ptr<Work>& work, Request request, const Footprint& footprint, const Manner& manner);
  WorkPtr run(const c10::intrusive_ptr<Work>& work, std::vector<Request> requests, const Footprint& footprint,
              const Manner& manner);
  WorkPtr handle(const c10::intrusive_ptr<Work>& work, const Footprint& footprint, const Manner& manner);
  // Waits for earlier collectives that use memory which this one writes, or the other way round: each works on what
  // those before it have left, as if they ran one after the other.
  void await_memory(const Footprint& footprint);
  // `results` is what the caller passed.
  WorkPtr exchange_all(const Tensors& results, const Tensors& outputs, const Tensors& inputs,
                       const Footprint& footprint, const Manner& manner);
  // All-gathers: of lists, one for each input; into one tensor for each input; and what both come to.
  WorkPtr gather_lists(c10d::OpType type, const TensorLists& lists, const Tensors& inputs, const Manner& manner);
  WorkPtr gather_tensors(c10d::OpType type, const Tensors& outputs, const Tensors& inputs, const Manner& manner);
  WorkPtr gather_all(c10d::OpType type, TensorLists lists, const Tensors& inputs, Tensors results,
                     const Footprint& footprint, const Manner& manner);
  WorkPtr reduce_scatter_tensors(c10d::OpType type, const Tensors& outputs, const Tensors& inputs,
                                 const c10d::ReduceScatterOptions& options);
  static Request request_allreduce(Work& work, const at::Tensor& tensor, const c10d::ReduceOp& op, int num_ranks);
  Request request_allgather(Work& work, const Tensors& outputs, const at::Tensor& input) const;
  Request request_reduce_scatter(Work& work, const at::Tensor& output, const Tensors& inputs,
                                 const c10d::ReduceOp& op) const;
  WorkPtr message(Tensors& tensors, int64_t peer, int tag, bool receives, c10d::OpType type, const char* title);
  // Returns at once; `get` of what it returns waits, and throws what went wrong.
  std::future<void> start_message(int64_t peer, uint32_t tag, uint8_t* data, uint64_t bytes, bool receives,
                                  std::chrono::milliseconds timeout);
  // Sends to nobody, or receives from nobody, where that rank is negative.
  double exchange_seconds(int to, int from, uint64_t bytes);
  // A copy of an output that shares memory with another tensor, to work on instead. When all is done, outputs get their
  // results in the order of these calls, as with Gloo: of those that share memory, the last one's result stays.
  static at::Tensor apart(Work& work, const at::Tensor& output, const char* operation);
  c10::intrusive_ptr<Work> make_work(c10d::OpType type, Tensors outputs, size_t parts = 1);
  std::chrono::milliseconds timeout_or_default(std::chrono::milliseconds timeout) const;
  void check_root(int64_t root, int64_t root_tensor, const char* operation) const;

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
  std::mutex in_flight_mutex_;
  std::vector<InFlight> in_flight_;
};

}  // namespace paceline
