// From tensors to places: where each chunk of a collective lies in this rank's memory.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <vector>

#include "engine/engine.h"
#include "engine/operation.h"

namespace paceline {

// One rank's part of a collective's buffer: where its input lies, where its result goes (either may be missing on
// this rank), and how many bytes that is.
struct Block {
  const uint8_t* input = nullptr;
  uint8_t* output = nullptr;
  uint64_t bytes = 0;
};

// Cuts blocks into the chunks of a program. The number of chunks is a multiple of the number of blocks. `homeless`
// gets the chunks that pass through this rank and have no place in its blocks.
std::vector<Place> cut(const Program& program, DType dtype, const std::vector<Block>& blocks,
                       std::vector<size_t>* homeless);

// The same for an operation, with memory for chunks that have no place.
void place(Engine& engine, Operation& operation, const std::vector<Block>& blocks);

DType dtype_of(const at::Tensor& tensor);

// Elements as the engine counts them: those of types it only moves are counted in bytes.
uint64_t count_of(const at::Tensor& tensor);

// A CPU tensor whose memory is one run, in the order of its elements. Other tensors are copied, and `copied` is set.
struct Contiguous {
  at::Tensor tensor;
  bool copied = false;
  uint8_t* data() const { return static_cast<uint8_t*>(tensor.data_ptr()); }
  uint64_t bytes() const { return tensor.nbytes(); }
};
Contiguous contiguous(const at::Tensor& tensor);
// The same for a tensor that is to be written, which the operation may refuse.
Contiguous writable(const at::Tensor& tensor, const char* operation);

// What remains to be done when the bytes of a result are there: the division of an average, and copies to tensors that
// are not contiguous. Each call does a slice of it, so that nobody waits for all of it.
class Finish {
 public:
  // Divides all elements.
  void divide(const Contiguous& sum, DType dtype, int divisor);
  // To the caller's tensor, where that is another.
  void copy(const at::Tensor& to, const Contiguous& from);

  bool empty() const { return tasks_.empty(); }
  // Returns whether there is more to do.
  bool operator()();

 private:
  struct Task {
    at::Tensor to, from;
    DType dtype = DType::kBytes;
    int divisor = 0;  // 0: a copy
    int64_t done = 0;
  };

  static bool divide_slice(Task& task);
  static bool copy_slice(Task& task);

  std::vector<Task> tasks_;  // the first is the next
};

}  // namespace paceline
