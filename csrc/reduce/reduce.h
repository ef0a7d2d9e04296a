// Element-wise reductions: what a reduce transfer does with the bytes that arrive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace paceline {

// Values travel in frame headers: never renumber.
enum class DType : uint8_t {
  kFloat32 = 0,
  kFloat64 = 1,
  kFloat16 = 2,
  kBFloat16 = 3,
  kInt8 = 4,
  kInt16 = 5,
  kInt32 = 6,
  kInt64 = 7,
  kUInt8 = 8,
  kUInt16 = 9,
  kUInt32 = 10,
  kUInt64 = 11,
  kBool = 12,
  kBytes = 13,  // moved, never reduced
};

enum class ReduceOp : uint8_t {
  kSum = 0,
  kProduct = 1,
  kMin = 2,
  kMax = 3,
  kBitAnd = 4,
  kBitOr = 5,
  kBitXor = 6,
  kAverage = 7,  // a sum on the way; divided once at the end, on every rank alike
};

size_t element_bytes(DType dtype);
const char* name(DType dtype);
const char* name(ReduceOp op);

// out[i] = a[i] op b[i]; out may be a. Operands need no alignment.
using Reduction = void (*)(void* out, const void* a, const void* b, size_t count);

// The fastest kernel this processor has, or nullptr where the operation makes no sense (bits of a float).
Reduction find_reduction(DType dtype, ReduceOp op);

// data[i] /= divisor (whole numbers round toward zero) and data[i] *= factor, for AVG and PREMUL_SUM.
void divide(DType dtype, void* data, size_t count, int divisor);
void multiply(DType dtype, void* out, const void* data, size_t count, double factor);

// Which instruction set the kernels use: "avx512", "avx2" or "portable".
const char* instruction_set();

}  // namespace paceline
