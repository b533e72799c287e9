// Sums made in parts, a launch each, and carried from one part to the next in the accumulator type.
#pragma once

#include "device/common/types.cuh"

namespace attention_ext {

// Adds what the parts before left to a quad; true in the last part, else leaves the sum to the next.
template <class Acc>
__device__ __forceinline__ bool carry_quad(Acc* g_carry, bool first, bool last, Acc (&total)[4]) {
  Quad<Acc>& carried = *reinterpret_cast<Quad<Acc>*>(g_carry);
  if (!first) {
    const Quad<Acc> before = carried;
#pragma unroll
    for (int e = 0; e < 4; ++e) total[e] += before.value[e];
  }
  if (!last) carried = {{total[0], total[1], total[2], total[3]}};
  return last;
}

}  // namespace attention_ext
