// c10d's handle on something in flight: one engine operation, or several that count as one.
#pragma once

#include <ATen/record_function.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "c10d/buffers.h"
#include "engine/engine.h"

namespace paceline {

// Beyond this a clock's nanoseconds would not do, and nobody waits.
constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24 * 365);

// Shows a call to the profiler, from here to the end of the scope. c10d::Work can do that, but ends it when the
// operation does: on another thread, perhaps after the profiler has stopped and freed its events, which ends the
// process.
class Recording {
 public:
  Recording(const char* title, const std::vector<at::Tensor>& inputs);

 private:
  at::RecordFunction function_{at::RecordScope::USER_SCOPE};
};

class Work final : public c10d::Work {
 public:
  // `outputs` is what result() and the future return.
  Work(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, uint64_t sequence, int parts = 1);

  // Whoever waits does the engine's work meanwhile, in this way.
  void let_help(std::shared_ptr<Engine> engine, std::shared_ptr<Group> group, const Waiting& waiting);
  // A part of it was posted as this operation, the last so far.
  void posted(const Operation& operation);
  // Called before anybody waits for it without a time limit of his own.
  void when_awaited(std::function<void()> notice) { when_awaited_ = std::move(notice); }

  // Copies to `to` when all parts are done, in the order of these calls.
  void copy_at_the_end(const at::Tensor& to, const at::Tensor& from) { copies_.copy(to, {from, true}); }
  bool copies_at_the_end() const { return !copies_.empty(); }
  // Under the engine's lock, once for each part: whether it is the last.
  bool last_part() { return --unfinished_ == 0; }
  // Makes a slice of the copies; returns whether there is more to do.
  bool copy_slice() { return copies_(); }

  // One part is done: an empty string, or what went wrong. Any thread, once a part.
  void done(const std::string& error);
  // Of a receive from any rank.
  void set_source(int rank) { source_ = rank; }
  // What must stay alive until the end.
  void keep(at::Tensor tensor) { kept_.push_back(std::move(tensor)); }

  bool finished() const { return finished_; }
  bool wait(std::chrono::milliseconds timeout) override;
  int sourceRank() const override { return source_; }
  std::vector<at::Tensor> result() override;
  uint64_t getSequencenumber() const override { return sequence_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  void abort() override;
  // Called when nobody holds it but by weak pointers.
  void release_resources() override;

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
  Finish copies_;
  int unfinished_;
  uint64_t sequence_;
  std::atomic<int> parts_;
  std::atomic<int> source_{-1};
  std::mutex future_mutex_;
  std::string error_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool settled_ = false;
};

// The exception people catch: torch.distributed.DistBackendError.
std::exception_ptr backend_error(const std::string& message);

// Runs callbacks of futures, which may call Python, wait for other collectives, or both: never the progress thread.
// A new thread is started when all are busy, so that a callback that waits cannot block the one it waits for.
void run_elsewhere(std::function<void()> task);
// Starts the first of these threads, which stays; throws if the system has none to give.
void be_ready_to_run_elsewhere();

}  // namespace paceline
