#define PACELINE_KERNELS avx2
#include "reduce/kernels.inc"
