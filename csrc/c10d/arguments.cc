#include "c10d/arguments.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <cstring>

namespace paceline {

void check_same_type(const at::Tensor& a, const at::Tensor& b, const char* operation) {
  TORCH_CHECK_TYPE(a.scalar_type() == b.scalar_type(), operation, " takes tensors of one type, not of ",
                   a.scalar_type(), " and ", b.scalar_type());
}

std::vector<at::Tensor> parts(const at::Tensor& tensor, int size, const char* operation) {
  TORCH_CHECK_VALUE(tensor.numel() % size == 0, operation, ": ", tensor.numel(), " elements cannot be shared by ", size,
                    " ranks equally");
  TORCH_CHECK_VALUE(tensor.is_contiguous(), operation, " needs a contiguous tensor");
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
