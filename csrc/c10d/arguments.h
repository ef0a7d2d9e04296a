// What operations ask of the tensors they are given.
#pragma once

#include <ATen/ATen.h>

#include <vector>

namespace paceline {

template <typename T>
const T& single(const std::vector<T>& given, const char* operation) {
  TORCH_CHECK_VALUE(given.size() == 1, operation, " takes one tensor, or one list of tensors, a rank, not ",
                    given.size());
  return given.front();
}

void check_same_type(const at::Tensor& a, const at::Tensor& b, const char* operation);

// The equal parts of a flat tensor, one a rank.
std::vector<at::Tensor> parts(const at::Tensor& tensor, int size, const char* operation);

// In whatever thread, and whatever the tensor is to autograd: the caller has been told that it will be overwritten.
void copy_back(const at::Tensor& to, const at::Tensor& from);

void copy_bytes(uint8_t* to, const uint8_t* from, uint64_t bytes);

}  // namespace paceline
