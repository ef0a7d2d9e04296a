// c10d's handle on something in flight: one engine operation, or several that count as one.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "engine/engine.h"

namespace paceline {

class Work final : public c10d::Work {
 public:
  // `outputs` is what result() and the future return.
  Work(int rank, c10d::OpType type, const char* title, const std::optional<std::vector<at::Tensor>>& inputs,
       std::vector<at::Tensor> outputs, uint64_t sequence, int parts = 1);

  // Whoever waits does the engine's work meanwhile, in this way.
  void let_help(std::shared_ptr<Engine> engine, std::shared_ptr<Group> group, const Waiting& waiting);
  // A part of it was posted as this operation, the last so far.
  void posted(const Operation& operation);
  // Called before anybody waits for it without a time limit of his own.
  void when_awaited(std::function<void()> notice) { when_awaited_ = std::move(notice); }

  // One part is done: an empty string, or what went wrong. Any thread, once a part.
  void done(const std::string& error);
  // Of a receive from any rank.
  void set_source(int rank) { source_ = rank; }
  // What must stay alive until the end.
  void keep(at::Tensor tensor) { kept_.push_back(std::move(tensor)); }

  bool wait(std::chrono::milliseconds timeout) override;
  int sourceRank() const override { return source_; }
  std::vector<at::Tensor> result() override;
  uint64_t getSequencenumber() const override { return sequence_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  void abort() override;

 private:
  void settle(const c10::intrusive_ptr<c10::ivalue::Future>& future);

  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Group> group_;
  Waiting waiting_;
  std::atomic<bool> finished_{false};
  std::function<void()> when_awaited_;
  Kind kind_ = Kind::kBarrier;
  uint64_t posted_as_ = 0;
  std::vector<at::Tensor> outputs_, kept_;
  uint64_t sequence_;
  std::atomic<int> parts_;
  std::atomic<int> source_{-1};
  std::mutex future_mutex_;
  std::string error_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool settled_ = false;
};

// What a collective returns: its handle, or nothing after it has ended, where its caller is going to wait at once.
// To wait here saves a way through Python, which takes longer than a small collective itself.
c10::intrusive_ptr<c10d::Work> handle(const c10::intrusive_ptr<Work>& work, bool asynchronous);

// The exception people catch: torch.distributed.DistBackendError.
std::exception_ptr backend_error(const std::string& message);

// Runs callbacks of futures, which may call Python, wait for other collectives, or both: never the progress thread.
// A new thread is started when all are busy, so that a callback that waits cannot block the one it waits for.
void run_elsewhere(std::function<void()> task);

}  // namespace paceline
