// Which matrices of float32 attention are to be made anew by the pipeline on CUDA cores, as two half terms of an operand leave out
// too much of them. Grid: one thread per matrix.
#include "attention/sm90/split_half/split_half.h"
#include "core/arithmetic.h"
#include "device/common/math.cuh"

namespace attention_ext {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) split_half_exact_kernel(const __grid_constant__ SplitHalfExactParams p) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (n >= p.N) return;
  const SplitHalfFacts query = p.query[n], key = p.key[n / p.key_group * p.key_group], value = p.value[n / p.value_group * p.value_group];
  // What the terms leave out of a score, in units of its exponent of 2: independent errors of 2^-22 an element are allowed.
  const float left_out = fabsf(static_cast<float>(p.scale)) * kLog2E *
                         (__uint_as_float(query.left_out) * __uint_as_float(key.norm) +
                          __uint_as_float(key.left_out) * __uint_as_float(query.norm));
  const bool enough = left_out <= 0x1p-22f * sqrtf(static_cast<float>(p.E));  // false for NaN
  p.exact[n] = !enough || query.exact != 0 || key.exact != 0 || value.exact != 0;
}

}  // namespace

cudaError_t launch_split_half_exact(const SplitHalfExactParams& params, cudaStream_t stream) {
  split_half_exact_kernel<<<static_cast<unsigned>(ceil_div(params.N, kThreads)), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace attention_ext
