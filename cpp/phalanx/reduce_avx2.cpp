// The loops of reduce.hpp for x86-64 with AVX2 and F16C.
#if defined(__AVX2__)
#define PHALANX_LOOPS avx2
#include "reduce_loops.hpp"
#endif
