#include "c10d/buffers.h"

#include <algorithm>

#include "c10d/arguments.h"

namespace paceline {
namespace {

// An empty chunk travels as one byte, so that its arrival can be seen. All of them share this one; nobody reads it.
uint8_t nothing[8];

// A slice of what is to be done at the end.
constexpr int64_t kFinishBytes = 1 << 20;

}  // namespace

DType dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kChar:
      return DType::kInt8;
    case at::kShort:
      return DType::kInt16;
    case at::kInt:
      return DType::kInt32;
    case at::kLong:
      return DType::kInt64;
    case at::kByte:
      return DType::kUInt8;
    case at::kUInt16:
      return DType::kUInt16;
    case at::kUInt32:
      return DType::kUInt32;
    case at::kUInt64:
      return DType::kUInt64;
    case at::kBool:
      return DType::kBool;
    default:
      return DType::kBytes;
  }
}

uint64_t count_of(const at::Tensor& tensor) {
  return dtype_of(tensor) == DType::kBytes ? tensor.nbytes() : static_cast<uint64_t>(tensor.numel());
}

Contiguous contiguous(const at::Tensor& tensor) {
  check_dense(tensor);
  // Dense in another order (transposed, channels-last) will not do: the other side's tensor may have other strides.
  if (tensor.is_contiguous()) return {tensor, false};
  return {tensor.contiguous(), true};
}

Contiguous writable(const at::Tensor& tensor, const char* operation) {
  check_writable(tensor, operation);
  return contiguous(tensor);
}

void Finish::divide(const Contiguous& sum, DType dtype, int divisor) {
  tasks_.push_back({sum.tensor, {}, dtype, divisor});
}

void Finish::copy(const at::Tensor& to, const Contiguous& from) {
  if (from.copied) tasks_.push_back({to, from.tensor});
}

bool Finish::operator()() {
  Task& task = tasks_.front();
  if (task.divisor != 0 ? divide_slice(task) : copy_slice(task)) return true;
  tasks_.erase(tasks_.begin());
  return !tasks_.empty();
}

bool Finish::divide_slice(Task& task) {
  const auto element = static_cast<int64_t>(element_bytes(task.dtype));
  const auto count = static_cast<int64_t>(count_of(task.to));
  const int64_t slice = std::min(count - task.done, kFinishBytes / element);
  auto* data = static_cast<uint8_t*>(task.to.data_ptr()) + task.done * element;
  paceline::divide(task.dtype, data, static_cast<size_t>(slice), task.divisor);
  task.done += slice;
  return task.done < count;
}

bool Finish::copy_slice(Task& task) {
  const int64_t bytes = static_cast<int64_t>(task.to.nbytes());
  if (bytes <= kFinishBytes) {
    copy_back(task.to, task.from);
    return false;
  }
  const at::IntArrayRef sizes = task.to.sizes();
  const auto dim = std::max_element(sizes.begin(), sizes.end()) - sizes.begin();
  const int64_t rows = std::max<int64_t>(1, sizes[dim] * kFinishBytes / bytes);
  const int64_t slice = std::min(sizes[dim] - task.done, rows);
  copy_back(task.to.narrow(dim, task.done, slice), task.from.narrow(dim, task.done, slice));
  task.done += slice;
  return task.done < sizes[dim];
}

std::vector<Place> cut(const Program& program, DType dtype, const std::vector<Block>& blocks,
                       std::vector<size_t>* homeless) {
  const uint64_t element = element_bytes(dtype);
  const uint64_t parts = program.num_chunks() / blocks.size();
  std::vector<Place> places(program.num_chunks());
  for (size_t b = 0; b < blocks.size(); ++b) {
    const uint64_t count = blocks[b].bytes / element;
    for (uint64_t part = 0; part < parts; ++part) {
      const uint64_t begin = count * part / parts * element;
      const uint64_t end = count * (part + 1) / parts * element;
      const size_t chunk = b * parts + part;
      Place& place = places[chunk];
      place.bytes = end - begin;
      if (place.bytes == 0) {
        place = {nothing, nothing, 1};
        continue;
      }
      if (blocks[b].input != nullptr) place.input = blocks[b].input + begin;
      if (blocks[b].output != nullptr) place.work = blocks[b].output + begin;
      if (place.work == nullptr && program.written()[chunk]) homeless->push_back(chunk);
    }
  }
  return places;
}

void place(Engine& engine, Operation& operation, const std::vector<Block>& blocks) {
  std::vector<size_t> homeless;
  operation.places = cut(*operation.program, operation.call.dtype, blocks, &homeless);
  if (homeless.empty()) return;
  uint64_t passing = 0;
  for (const size_t chunk : homeless) passing += operation.places[chunk].bytes;
  operation.memory.push_back(engine.take_scratch(passing));
  uint8_t* at = operation.memory.back().data();
  for (const size_t chunk : homeless) {
    operation.places[chunk].work = at;
    at += operation.places[chunk].bytes;
  }
}

}  // namespace paceline
