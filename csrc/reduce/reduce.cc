#include "reduce/reduce.h"

#include "reduce/kernels.h"

namespace paceline {
namespace {

struct Kernels {
  Reduction (*find)(DType, ReduceOp);
  void (*rescale)(DType, void*, const void*, size_t, double, bool);
  const char* name;
};

Kernels choose() {
#ifdef PACELINE_X86
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx2")) {
    return {avx512::find, avx512::rescale, "avx512"};
  }
  // Every processor with AVX2 has F16C, which clang cannot be asked for.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {avx2::find, avx2::rescale, "avx2"};
#endif
  return {portable::find, portable::rescale, "portable"};
}

const Kernels& kernels() {
  static const Kernels chosen = choose();
  return chosen;
}

}  // namespace

size_t element_bytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kInt64:
    case DType::kUInt64:
      return 8;
    case DType::kFloat32:
    case DType::kInt32:
    case DType::kUInt32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kInt16:
    case DType::kUInt16:
      return 2;
    default:
      return 1;
  }
}

const char* name(DType dtype) {
  constexpr const char* kNames[] = {"float32", "float64", "float16", "bfloat16", "int8",   "int16", "int32",
                                    "int64",   "uint8",   "uint16",  "uint32",   "uint64", "bool",  "bytes"};
  const auto index = static_cast<size_t>(dtype);
  return index < std::size(kNames) ? kNames[index] : "unknown";
}

const char* name(ReduceOp op) {
  constexpr const char* kNames[] = {"sum", "product", "min", "max", "band", "bor", "bxor", "avg"};
  const auto index = static_cast<size_t>(op);
  return index < std::size(kNames) ? kNames[index] : "unknown";
}

Reduction find_reduction(DType dtype, ReduceOp op) { return kernels().find(dtype, op); }

void divide(DType dtype, void* data, size_t count, int divisor) {
  kernels().rescale(dtype, data, data, count, divisor, true);
}

void multiply(DType dtype, void* out, const void* data, size_t count, double factor) {
  kernels().rescale(dtype, out, data, count, factor, false);
}

const char* instruction_set() { return kernels().name; }

}  // namespace paceline
