#define PACELINE_KERNELS avx512
#include "reduce/kernels.inc"
