// Point-to-point operations, and what is made of them: the exchange that measures links, and the monitored barrier.
#include <future>

#include "c10d/arguments.h"
#include "c10d/backend.h"

namespace paceline {
namespace {

// Tags of our own messages are beyond those users can choose.
constexpr uint32_t kMonitorTag = 0x80000000;
constexpr uint32_t kExchangeTag = 0xffffffff;

}  // namespace

Backend::WorkPtr Backend::message(Tensors& tensors, int64_t peer, int tag, bool receives, c10d::OpType type,
                                  const char* title) {
  const Recording recording(title, tensors);
  const at::Tensor tensor = single(tensors, title);
  TORCH_CHECK(tag >= 0, title, ": Tag must be nonnegative, not ", tag);
  TORCH_CHECK(peer < size_ && peer != rank_ && (peer >= 0 || type == c10d::OpType::RECVANYSOURCE), title, ": rank ",
              peer, " is not another rank of this group");
  TORCH_CHECK(!left_, "this process group was destroyed");
  const Contiguous flat = receives ? writable(tensor, title) : contiguous(tensor);
  const auto work = make_work(type, tensors);
  work->keep(flat.tensor);
  const auto message = std::make_shared<Message>();
  message->peer = peer;
  message->tag = static_cast<uint32_t>(tag);
  message->data = flat.data();
  message->bytes = flat.bytes();
  // As with Gloo the time limit counts from when somebody waits: a receive may be posted long before.
  const std::chrono::milliseconds timeout = timeout_or_default(c10d::kUnsetTimeout);
  work->when_awaited([engine = engine_.get(), weak = std::weak_ptr<Message>(message), timeout] {
    if (const std::shared_ptr<Message> awaited = weak.lock()) engine->hurry(awaited, timeout);
  });
  // The message outlives its own callback, and must not keep itself alive.
  message->on_done = [work, flat, tensor, receives, engine = engine_,
                      message = message.get()](const std::string& error) {
    if (!error.empty() || !receives) return work->done(error);
    work->set_source(static_cast<int>(message->peer));
    if (!flat.copied) return work->done("");
    run_elsewhere([work, flat, tensor, engine] {  // not under the engine's lock: it may be large
      std::string failure;
      try {
        copy_back(tensor, flat.tensor);
      } catch (const std::exception& thrown) {
        failure = std::string("a message cannot be stored: ") + thrown.what();
      }
      work->done(failure);
      engine->look_again();
    });
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
  const auto promise = std::make_shared<std::promise<void>>();
  const auto message = std::make_shared<Message>();
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
  const std::chrono::milliseconds timeout = timeout_or_default(c10d::kUnsetTimeout);
  std::vector<uint8_t> out(bytes), in(bytes);
  const auto begin = Clock::now();
  std::future<void> received;
  if (from >= 0) received = start_message(from, kExchangeTag, in.data(), bytes, true, timeout);
  if (to >= 0) start_message(to, kExchangeTag, out.data(), bytes, false, timeout).get();
  if (received.valid()) received.get();
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
