// The loops of reduce.hpp for x86-64 with AVX-512 (F, BW, DQ, VL) and F16C.
#if defined(__AVX512F__)
#define PHALANX_LOOPS avx512
#include "reduce_loops.hpp"
#endif
