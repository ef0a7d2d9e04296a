// The same kernels compiled for several instruction sets; reduce.cc picks one at run time.
#pragma once

#include "reduce/reduce.h"

namespace paceline {

#define PACELINE_DECLARE_KERNELS(set)                                                               \
  namespace set {                                                                                   \
  Reduction find(DType dtype, ReduceOp op);                                                         \
  void rescale(DType dtype, void* out, const void* data, size_t count, double factor, bool divide); \
  }

PACELINE_DECLARE_KERNELS(portable)
PACELINE_DECLARE_KERNELS(avx2)
PACELINE_DECLARE_KERNELS(avx512)

#undef PACELINE_DECLARE_KERNELS

}  // namespace paceline
