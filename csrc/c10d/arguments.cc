#include "c10d/arguments.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <cstring>

namespace paceline {

// The words "invalid tensor type at index", "invalid tensor size at index" and the like are Gloo's, which people know.
void check_same_type(const at::Tensor& expected, const at::Tensor& actual, size_t index, const char* operation) {
  TORCH_CHECK(expected.scalar_type() == actual.scalar_type(), operation, ": invalid tensor type at index ", index,
              " (expected ", expected.scalar_type(), ", got ", actual.scalar_type(), ")");
}

void check_same_elements(const at::Tensor& expected, const at::Tensor& actual, size_t index, const char* operation) {
  TORCH_CHECK(expected.numel() == actual.numel(), operation, ": invalid tensor size at index ", index, " (expected ",
              expected.sizes(), ", got ", actual.sizes(), ")");
}

void check_dense(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.device().is_cpu(), "the paceline backend moves CPU tensors, and this one is on ", tensor.device(),
              ": use nccl (or paceline's wrappers over nccl) for it");
  TORCH_CHECK(tensor.layout() == at::kStrided, "the paceline backend cannot move a tensor of layout ", tensor.layout(),
              " in this operation");
}

void check_writable(const at::Tensor& tensor, const char* operation) {
  if (tensor.is_contiguous() || tensor.numel() == 0) return;
  // In the order of their strides, each dimension must step over all that the ones before it reach.
  c10::SmallVector<std::pair<int64_t, int64_t>, 5> steps;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) > 1) steps.emplace_back(tensor.stride(dim), tensor.size(dim));
  }
  std::sort(steps.begin(), steps.end());
  int64_t reach = 0;
  for (const auto& [stride, size] : steps) {
    TORCH_CHECK(stride > reach, operation, " cannot write to a tensor whose elements share memory (sizes ",
                tensor.sizes(), ", strides ", tensor.strides(), "): clone() it first");
    reach += stride * (size - 1);
  }
}

void Footprint::reads(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) add(tensor, false);
}

void Footprint::writes(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) add(tensor, true);
}

void Footprint::add(const at::Tensor& tensor, bool written) {
  check_dense(tensor);
  if (tensor.numel() == 0) return;
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += tensor.stride(dim) * (tensor.size(dim) - 1);
  const auto* begin = static_cast<const uint8_t*>(tensor.const_data_ptr());
  extents_.push_back({begin, begin + (last + 1) * tensor.element_size(), written});
}

bool Footprint::overlaps_itself() const {
  if (extents_.size() < 2) return false;
  std::vector<Extent> sorted(extents_.begin(), extents_.end());
  std::sort(sorted.begin(), sorted.end(), [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  const uint8_t *used = nullptr, *written = nullptr;  // up to where those before reach
  for (const Extent& extent : sorted) {
    if (extent.begin < (extent.written ? used : written)) return true;
    used = std::max(used, extent.end);
    if (extent.written) written = std::max(written, extent.end);
  }
  return false;
}

bool Footprint::overlaps(const Footprint& other) const {
  for (const Extent& a : extents_) {
    for (const Extent& b : other.extents_) {
      if ((a.written || b.written) && a.begin < b.end && b.begin < a.end) return true;
    }
  }
  return false;
}

bool in_place(const at::Tensor& a, const at::Tensor& b) {
  return a.const_data_ptr() == b.const_data_ptr() && a.nbytes() == b.nbytes() && a.is_contiguous() && b.is_contiguous();
}

std::vector<at::Tensor> parts(const at::Tensor& tensor, int size, const char* operation) {
  TORCH_CHECK(tensor.numel() % size == 0, operation, ": ", tensor.numel(), " elements cannot be shared by ", size,
              " ranks equally");
  TORCH_CHECK(tensor.is_contiguous(), operation, " needs a contiguous tensor");
  return tensor.view({-1}).chunk(size).size() == static_cast<size_t>(size)
             ? tensor.view({-1}).chunk(size)
             : std::vector<at::Tensor>(static_cast<size_t>(size), tensor.view({-1}));
}

void copy_back(const at::Tensor& to, const at::Tensor& from) {
  const at::AutoDispatchBelowADInplaceOrView below;
  to.copy_(from);
}

void copy_bytes(uint8_t* to, const uint8_t* from, uint64_t bytes) {
  if (bytes > 0 && to != from) std::memmove(to, from, bytes);
}

}  // namespace paceline
