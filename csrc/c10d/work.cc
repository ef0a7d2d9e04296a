#include "c10d/work.h"

#include <c10/util/Exception.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <system_error>
#include <thread>

#include "common/attempt.h"
#include "common/log.h"

namespace paceline {
namespace {

// Threads that run tasks. One stays as long as the process; others end when they have been idle for a while.
class Callbacks {
 public:
  explicit Callbacks(pid_t process) : process(process) {}

  // Throws if not even one thread can be started.
  void begin() {
    const std::lock_guard lock(mutex_);
    if (threads_ == 0) start();
  }

  void run(std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    // Where no further thread can be had, those there are come to the task later.
    if (tasks_.size() <= idle_ || !attempt([this] { start(); })) ready_.notify_one();
  }

  const pid_t process;

 private:
  void start() {
    std::thread([this] { serve(); }).detach();
    ++threads_;
  }

  void serve() {
    ::pthread_setname_np(::pthread_self(), "paceline-then");
    std::unique_lock lock(mutex_);
    for (;;) {
      while (tasks_.empty()) {
        ++idle_;
        const bool woken = ready_.wait_for(lock, std::chrono::seconds(5), [this] { return !tasks_.empty(); });
        --idle_;
        if (!woken && threads_ > 1) {
          --threads_;
          return;
        }
      }
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      try {
        task();
      } catch (const std::exception& error) {
        log(LogLevel::kError, std::string("a callback failed: ") + error.what());
      } catch (...) {
        log(LogLevel::kError, "a callback failed");
      }
      task = nullptr;  // without the lock: what it holds may need Python's
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<std::function<void()>> tasks_;
  size_t threads_ = 0, idle_ = 0;
};

// Outlives static destructors: threads may still be in it. A forked child has none of the threads, and gets its own.
Callbacks& callbacks() {
  static std::atomic<Callbacks*> current{new Callbacks(::getpid())};
  Callbacks* here = current.load();
  while (here->process != ::getpid()) {
    auto* own = new Callbacks(::getpid());
    if (current.compare_exchange_strong(here, own)) return *own;
    delete own;
  }
  return *here;
}

}  // namespace

void be_ready_to_run_elsewhere() {
  try {
    callbacks().begin();
  } catch (const std::system_error& error) {
    throw std::system_error(error.code(), "paceline cannot start a thread for callbacks (ulimit -u)");
  }
}

void run_elsewhere(std::function<void()> task) { callbacks().run(std::move(task)); }

std::exception_ptr backend_error(const std::string& message) {
  try {
    C10_THROW_ERROR(DistBackendError, message);
  } catch (...) {
    return std::current_exception();
  }
}

Recording::Recording(const char* title, const std::vector<at::Tensor>& inputs) {
  if (!function_.isActive()) return;
  function_._setAsync();  // as Gloo's are: the operation may go on after the call
  const std::vector<c10::IValue> values(inputs.begin(), inputs.end());
  function_.before(title, c10::ArrayRef<const c10::IValue>(values.data(), values.size()));
}

Work::Work(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, uint64_t sequence, int parts)
    : c10d::Work(rank, type), outputs_(std::move(outputs)), unfinished_(parts), sequence_(sequence), parts_(parts) {}

void Work::release_resources() {
  outputs_.clear();
  kept_.clear();
  copies_ = {};
  future_.reset();
  group_.reset();
  engine_.reset();
}

void Work::done(const std::string& error) {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(future_mutex_);
    if (error_.empty() && !attempt([&] { error_ = error; })) error_ = "out of memory";
    if (parts_.fetch_sub(1) > 1) return;
    settled_ = true;
    future = future_;
  }
  finish(error_.empty() ? nullptr : backend_error(error_));
  finished_ = true;
  if (future) {
    const auto self = c10::intrusive_ptr<Work>::unsafe_reclaim_from_nonowning(this);
    run_elsewhere([self, future] { self->settle(future); });
  }
}

void Work::settle(const c10::intrusive_ptr<c10::ivalue::Future>& future) {
  if (error_.empty()) {
    future->markCompleted(c10::IValue(outputs_));
  } else {
    future->setError(backend_error(error_));
  }
}

void Work::let_help(std::shared_ptr<Engine> engine, std::shared_ptr<Group> group, const Waiting& waiting) {
  engine_ = std::move(engine);
  group_ = std::move(group);
  waiting_ = waiting;
}

void Work::posted(const Operation& operation) {
  kind_ = operation.call.kind;
  posted_as_ = operation.seq;
}

bool Work::wait(std::chrono::milliseconds timeout) {
  const bool bounded = timeout != kNoTimeout;
  timeout = std::clamp(timeout, -kLongestTimeout, kLongestTimeout);
  const Clock::time_point until = bounded ? Clock::now() + timeout : Clock::time_point::max();
  if (!finished_) {
    if (!bounded && when_awaited_) when_awaited_();
    engine_->help(finished_, until, waiting_);
  }
  bool done = false;
  if (bounded) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now());
    done = c10d::Work::wait(std::max(left, std::chrono::milliseconds(1)));
  } else {
    done = (finished_ && error_.empty()) || c10d::Work::wait(timeout);
  }
  engine_->tidy();  // the operation, if another thread has ended it: it holds the tensors
  // A root that only sends is done before others have looked at what it sent.
  if (group_->disputes(posted_as_)) {
    std::rethrow_exception(backend_error(engine_->failure_of(group_, title(kind_, posted_as_))));
  }
  return done;
}

std::vector<at::Tensor> Work::result() { return outputs_; }

c10::intrusive_ptr<c10::ivalue::Future> Work::getFuture() {
  if (!finished_ && when_awaited_) when_awaited_();  // who waits for the future does not tell us
  const std::lock_guard lock(future_mutex_);
  if (!future_) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    if (settled_) settle(future_);
  }
  return future_;
}

void Work::abort() { TORCH_CHECK(false, "a single collective cannot be aborted: abort its process group"); }

}  // namespace paceline
