// The loops of reduce.hpp for any processor of this kind.
#define PHALANX_LOOPS baseline
#include "reduce_loops.hpp"
