// Rows of float32 attention that two half terms are not enough for, made anew in float on CUDA cores: out and log-sum-exp by the
// online softmax. What calls for it is rare (docs/kernels/sm90_split_half.md), so this is short, not fast.
//
// One CTA at a time takes 16 rows of a matrix and goes through their keys 64 at a time: scores, weights, then out, which waits in
// memory, 64 columns at a time.
// Grid: CTAs that stay and look for such rows. 256 threads: 16 a row. Shared memory: 31 KB.
#include "attention/sm90/split_half/exact_products.cuh"
#include "attention/sm90/split_half/split_half.h"
#include "attention/softmax/online_softmax.cuh"
#include "core/arithmetic.h"
#include "core/device_info.h"
#include "core/launch.cuh"
#include "device/common/batch.cuh"
#include "device/sm90/dependent_launch.cuh"

namespace attention_ext {
namespace {

static_assert(kExactRows == kExactTileRows, "rows that are marked together are made together");

__device__ __forceinline__ bool needs_exact(const SplitHalfExactParams& p, int64_t n) {
  const int64_t key_group = p.call.key.group, value_group = p.call.value.group;
  return scores_need_exact(p.call, p.query[n], p.key[n / key_group * key_group]) ||
         p.value[n / value_group * value_group].exact != 0;
}

__global__ void __launch_bounds__(kExactThreads, 1) split_half_exact_kernel(const __grid_constant__ SplitHalfExactParams p) {
  __shared__ ExactShared s;
  __shared__ bool s_found[kExactThreads];
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  wait_for_prerequisites();
#endif
  const ForwardParams& call = p.call;
  const int64_t groups = (call.L + kExactRows - 1) / kExactRows;
  const auto make_unit = [&](int64_t unit) {
    const ExactHead head(call, unit / groups);
    const int first_row = static_cast<int>(unit - head.n * groups) * kExactRows, row = first_row + exact_row();
    const bool exists = row < call.L;
    const int end = head.range.end_of_tile(first_row, kExactRows);
    const ExactRows query = head.rows_of(call.query, first_row, call.L);
    float* g_out =
        static_cast<float*>(call.out.data) + batch_offset(call.batch, call.out, head.n, 0) + row * call.out.row_stride;

    float max = negative_infinity(0.0f), sum = 0.0f;
#pragma unroll 1
    for (int first_key = 0; first_key < end; first_key += kExactKeys) {
      float x[kExactOfThread], block_max = max;
      multiply_rows(query, head.rows_of(call.key, first_key, end), static_cast<int>(call.E), s, x);
#pragma unroll
      for (int i = 0; i < kExactOfThread; ++i) {
        x[i] = head.score(x[i], row, first_key + exact_place(i));
        block_max = maximum(block_max, x[i]);
      }
      block_max = warp_max<kExactRowThreads>(block_max);
      const float reference = block_max == negative_infinity(0.0f) ? 0.0f : block_max, factor = expf(max - reference);
      float block_sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kExactOfThread; ++i) {
        const float weight = expf(x[i] - reference);
        block_sum += weight;
        s.weights[exact_row()][exact_place(i)] = head.keeps(row, first_key + exact_place(i)) ? weight : 0.0f;
      }
      sum = sum * factor + warp_sum<kExactRowThreads>(block_sum);
      max = block_max;
      multiply_weights(head.rows_of(call.value, first_key, end), static_cast<int>(call.Ev), s, [&](int col, float out) {
        if (!exists) return;
        float& stored = g_out[col * call.out.col_stride];
        stored = first_key == 0 ? out : fmaf(stored, factor, out);
      });
    }
#pragma unroll 1
    for (int col = exact_place(0); exists && col < call.Ev; col += kExactRowThreads) {
      float& stored = g_out[col * call.out.col_stride];
      stored = sum == 0.0f ? 0.0f : stored / sum * head.keep_scale();
    }
    if (exact_place(0) == 0 && exists) {
      static_cast<float*>(call.lse.data)[batch_offset(call.batch, call.lse, head.n, 0) + row * call.lse.row_stride] =
          log_sum_exp(max, sum);
    }
  };
  for_each_found(
      call.N * groups, s_found, [&](int64_t unit) { return p.marks[unit] != 0 || needs_exact(p, unit / groups); }, make_unit);
}

}  // namespace

cudaError_t launch_split_half_exact(const SplitHalfExactParams& params, cudaStream_t stream) {
  const int64_t units = params.call.N * ceil_div(params.call.L, kExactRows), most = 8 * current_device_info().sms;
  LaunchShape shape = {std::min(units, most), kExactThreads};
  shape.early = true;
  return launch_kernel(split_half_exact_kernel, shape, stream, params);
}

}  // namespace attention_ext
