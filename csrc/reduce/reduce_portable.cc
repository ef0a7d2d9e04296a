#define PACELINE_KERNELS portable
#include "reduce/kernels.inc"
