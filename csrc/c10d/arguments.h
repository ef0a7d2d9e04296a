// What operations ask of the tensors they are given.
#pragma once

#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>

#include <vector>

namespace paceline {

// The only tensor, or list of tensors, that c10d passes for a rank.
template <typename T>
const T& single(const std::vector<T>& given, const char* operation) {
  TORCH_CHECK(given.size() == 1, operation, " requires a single-element tensor list, or one list of tensors, not ",
              given.size());
  return given.front();
}

// Refuses tensors of two types. `index` is the place of `actual` in its list.
void check_same_type(const at::Tensor& expected, const at::Tensor& actual, size_t index, const char* operation);
void check_same_elements(const at::Tensor& expected, const at::Tensor& actual, size_t index, const char* operation);
// Refuses what the engine cannot reach: tensors of other devices, and sparse ones.
void check_dense(const at::Tensor& tensor);
// Refuses to write to a tensor whose elements share memory, as those of an expanded one do.
void check_writable(const at::Tensor& tensor, const char* operation);

// The memory that a call reads and writes.
class Footprint {
 public:
  void reads(const at::Tensor& tensor) { add(tensor, false); }
  void writes(const at::Tensor& tensor) { add(tensor, true); }
  void reads(const std::vector<at::Tensor>& tensors);
  void writes(const std::vector<at::Tensor>& tensors);

  // Whether memory that the call writes is used by it a second time.
  bool overlaps_itself() const;
  // Whether one of the two writes memory that the other uses.
  bool overlaps(const Footprint& other) const;

 private:
  // From the first to the last byte, also of a tensor that is not contiguous.
  struct Extent {
    const uint8_t* begin;
    const uint8_t* end;
    bool written;
  };
  void add(const at::Tensor& tensor, bool written);

  c10::SmallVector<Extent, 4> extents_;
};

// Whether both are the same bytes.
bool in_place(const at::Tensor& a, const at::Tensor& b);

// The equal parts of a flat tensor, one a rank.
std::vector<at::Tensor> parts(const at::Tensor& tensor, int size, const char* operation);

// In whatever thread, and whatever the tensor is to autograd: the caller has been told that it will be overwritten.
void copy_back(const at::Tensor& to, const at::Tensor& from);

void copy_bytes(uint8_t* to, const uint8_t* from, uint64_t bytes);

}  // namespace paceline
