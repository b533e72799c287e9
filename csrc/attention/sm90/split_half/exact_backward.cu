// The backward of heads that two half terms are not enough for, made anew in float on CUDA cores: all query heads of a key head of
// which one is. Rare (docs/kernels/sm90_split_half.md), so this is short, not fast.
//
// 1. A CTA at a time takes 16 rows of a matrix and goes through their keys three times, 64 at a time: for their largest score and
//    sum, for delta = sum of P * dP - grad_lse, and for dQ, which grows in memory, or dS. Each time scores are made again.
// 2. A CTA at a time takes 16 keys of a key head and goes through the rows of its query heads: dV and dK.
// Grid: CTAs that stay and look for such heads. 256 threads: 16 a row. Shared memory: 31 KB.
#include "attention/sm90/split_half/exact_heads.cuh"
#include "core/device_info.h"
#include "core/launch.cuh"
#include "device/common/batch.cuh"

namespace attention_ext {
namespace {

__global__ void __launch_bounds__(kExactThreads, 1)
    split_half_exact_rows_kernel(const __grid_constant__ SplitHalfExactBackwardParams p) {
  __shared__ ExactShared s;
  __shared__ bool s_found[kExactThreads];
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#endif
  const BackwardParams& call = p.call;
  const Slice& slice = p.slice;
  const int64_t groups = (slice.row_count + kExactTileRows - 1) / kExactTileRows;
  const int E = static_cast<int>(call.E), Ev = static_cast<int>(call.Ev);
  const auto make_unit = [&](int64_t unit) {
    const ExactHead head(call, slice.batch_begin + unit / groups);
    const int slice_row = static_cast<int>(unit % groups) * kExactTileRows,
              first_row = static_cast<int>(slice.row_begin) + slice_row, row = first_row + exact_row();
    const bool exists = row < slice.row_begin + slice.row_count;
    const int end = head.range.end_of_tile(first_row, kExactTileRows);
    const ExactRows query = head.rows_of(call.query, first_row, call.L),
                    grad_out = head.rows_of(call.grad_out, first_row, call.L);
    float max = negative_infinity(0.0f), sum = 0.0f, delta = 0.0f;
    const auto scores = [&](int first_key, float (&x)[kExactOfThread]) {
      multiply_rows(query, head.rows_of(call.key, first_key, end), E, s, x);
#pragma unroll
      for (int i = 0; i < kExactOfThread; ++i) x[i] = head.score(x[i], row, first_key + exact_place(i));
    };
    // x: probabilities; grads: of the weights.
    const auto probabilities = [&](int first_key, float (&x)[kExactOfThread], float (&grads)[kExactOfThread]) {
      scores(first_key, x);
      multiply_rows(grad_out, head.rows_of(call.value, first_key, end), Ev, s, grads);
#pragma unroll
      for (int i = 0; i < kExactOfThread; ++i) {
        x[i] = exact_probability(x[i], max, sum);
        grads[i] = head.keeps(row, first_key + exact_place(i)) ? grads[i] * head.keep_scale() : 0.0f;
      }
    };
#pragma unroll 1
    for (int first_key = 0; first_key < end; first_key += kExactKeys) {
      float x[kExactOfThread], block_max = max, block_sum = 0.0f;
      scores(first_key, x);
#pragma unroll
      for (int i = 0; i < kExactOfThread; ++i) block_max = maximum(block_max, x[i]);
      block_max = warp_max<kExactRowThreads>(block_max);
      const float reference = block_max == negative_infinity(0.0f) ? 0.0f : block_max;
#pragma unroll
      for (int i = 0; i < kExactOfThread; ++i) block_sum += expf(x[i] - reference);
      sum = sum * expf(max - reference) + warp_sum<kExactRowThreads>(block_sum);
      max = block_max;
    }
#pragma unroll 1
    for (int first_key = 0; first_key < end; first_key += kExactKeys) {
      float x[kExactOfThread], grads[kExactOfThread], part = 0.0f;
      probabilities(first_key, x, grads);
#pragma unroll
      for (int i = 0; i < kExactOfThread; ++i) part += x[i] == 0.0f ? 0.0f : x[i] * grads[i];
      delta += warp_sum<kExactRowThreads>(part);
    }
    if (call.grad_lse.data != nullptr && exists) {
      delta -= head.rows_of(call.grad_lse, row, call.L).at(0, 0);
    }
    // Of 64 keys dS at a time, which store(place among them, dS) keeps.
    const auto make_score_grads = [&](int first_key, auto store) {
      float x[kExactOfThread], grads[kExactOfThread];
      probabilities(first_key, x, grads);
#pragma unroll
      for (int i = 0; i < kExactOfThread; ++i) store(exact_place(i), x[i] == 0.0f ? 0.0f : x[i] * (grads[i] - delta));
    };
    if (p.score_grads != nullptr) {
      float* g_grads = p.score_grads + (unit / groups * slice.row_count + slice_row + exact_row()) * p.pitch;
#pragma unroll 1
      for (int first_key = 0; first_key < end; first_key += kExactKeys) {
        make_score_grads(first_key, [&](int place, float grad) {
          if (exists) g_grads[first_key + place] = grad;
        });
        if (threadIdx.x == 0) {
          const int64_t row_blocks = (slice.row_count + kSplitHalfBlock - 1) / kSplitHalfBlock;
          const int64_t row_block = unit / groups * row_blocks + slice_row / kSplitHalfBlock;
          p.grad_exponents[row_block * (p.pitch / kSplitHalfBlock) + first_key / kSplitHalfBlock] = kTileOfFloats;
        }
      }
      return;
    }
    if (exists && exact_place(0) == 0) p.row_values[head.n * call.L + row] = {max, sum, delta};

    float* g_grad = static_cast<float*>(call.grad_query.data) + batch_offset(call.batch, call.grad_query, head.n, 0) +
                    row * call.grad_query.row_stride;
#pragma unroll 1
    for (int first_key = 0; first_key < end; first_key += kExactKeys) {
      make_score_grads(first_key, [&](int place, float grad) { s.weights[exact_row()][place] = grad; });
      multiply_weights(head.rows_of(call.key, first_key, end), E, s, [&](int col, float sum_of_keys) {
        if (!exists) return;
        float& stored = g_grad[col * call.grad_query.col_stride];
        stored = first_key == 0 ? sum_of_keys : stored + sum_of_keys;
      });
    }
#pragma unroll 1
    for (int col = exact_place(0); exists && col < E; col += kExactRowThreads) {
      float& stored = g_grad[col * call.grad_query.col_stride];
      stored = end == 0 ? 0.0f : stored * static_cast<float>(call.scale);
    }
  };
  const auto found = [&](int64_t unit) { return any_needs_exact(p, (slice.batch_begin + unit / groups) / call.key_group); };
  for_each_found(slice.batch_count * groups, s_found, found, make_unit);
}

__global__ void __launch_bounds__(kExactThreads, 1)
    split_half_exact_keys_kernel(const __grid_constant__ SplitHalfExactBackwardParams p) {
  __shared__ ExactShared s;
  __shared__ bool s_found[kExactThreads];
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#endif
  const BackwardParams& call = p.call;
  const int64_t groups = (call.S + kExactTileRows - 1) / kExactTileRows;
  const int E = static_cast<int>(call.E), Ev = static_cast<int>(call.Ev);
  const auto make_unit = [&](int64_t unit) {
    const int64_t first_head = unit / groups * call.key_group;
    const int first_key = static_cast<int>(unit % groups) * kExactTileRows, key = first_key + exact_row();
    bool first = true;
    const auto add_to = [&](const MatrixView& grad) {
      float* g_grad = static_cast<float*>(grad.data) + batch_offset(call.batch, grad, first_head, 0) + key * grad.row_stride;
      return [&grad, g_grad, first, exists = key < call.S](int col, float sum) {
        if (!exists) return;
        float& stored = g_grad[col * grad.col_stride];
        stored = first ? sum : stored + sum;
      };
    };
#pragma unroll 1
    for (int64_t n = first_head; n < first_head + call.key_group; ++n) {
      const ExactHead head(call, n);
      if (first_key >= head.range.keys) continue;
      const ExactRows keys = head.rows_of(call.key, first_key, head.range.keys),
                      values = head.rows_of(call.value, first_key, head.range.keys);
#pragma unroll 1
      for (int first_row = head.range.first_row(first_key); first_row < call.L; first_row += kExactKeys) {
        const ExactRows query = head.rows_of(call.query, first_row, call.L),
                        grad_out = head.rows_of(call.grad_out, first_row, call.L);
        float x[kExactOfThread], grads[kExactOfThread];
        multiply_rows(keys, query, E, s, x);
        multiply_rows(values, grad_out, Ev, s, grads);
#pragma unroll
        for (int i = 0; i < kExactOfThread; ++i) {
          const int row = first_row + exact_place(i);
          const SplitHalfRowValues of_row =
              row < call.L ? p.row_values[n * call.L + row] : SplitHalfRowValues{0.0f, 1.0f, 0.0f};
          const float weight = exact_probability(head.score(x[i], row, key), of_row.reference, of_row.sum);
          const bool kept = head.keeps(row, key);
          s.weights[exact_row()][exact_place(i)] = kept ? weight : 0.0f;
          grads[i] = weight == 0.0f ? 0.0f : weight * ((kept ? grads[i] * head.keep_scale() : 0.0f) - of_row.delta);
        }
        multiply_weights(grad_out, Ev, s, add_to(call.grad_value));
        __syncthreads();  // the probabilities have been read
#pragma unroll
        for (int i = 0; i < kExactOfThread; ++i) s.weights[exact_row()][exact_place(i)] = grads[i];
        multiply_weights(query, E, s, add_to(call.grad_key));
        first = false;
      }
    }
    if (key >= call.S) return;
    const auto finish = [&](const MatrixView& grad, int width, float factor) {
      float* g_grad = static_cast<float*>(grad.data) + batch_offset(call.batch, grad, first_head, 0) + key * grad.row_stride;
#pragma unroll 1
      for (int col = exact_place(0); col < width; col += kExactRowThreads) {
        float& stored = g_grad[col * grad.col_stride];
        stored = first ? 0.0f : stored * factor;
      }
    };
    finish(call.grad_key, E, static_cast<float>(call.scale));
    finish(call.grad_value, Ev, call.dropout.seed == nullptr ? 1.0f : static_cast<float>(call.dropout.keep_scale));
  };
  for_each_found(
      call.N / call.key_group * groups, s_found, [&](int64_t unit) { return any_needs_exact(p, unit / groups); }, make_unit);
}

// As many as run at once: to look takes a moment, which rounds of CTAs would multiply.
int64_t most_ctas() { return current_device_info().sms; }

}  // namespace

cudaError_t launch_split_half_exact_rows(const SplitHalfExactBackwardParams& params, cudaStream_t stream) {
  const int64_t units = params.slice.batch_count * ceil_div(params.slice.row_count, kExactTileRows);
  return launch_kernel(split_half_exact_rows_kernel, {std::min(units, most_ctas()), kExactThreads}, stream, params);
}

cudaError_t launch_split_half_exact_backward(const SplitHalfExactBackwardParams& params, cudaStream_t stream) {
  const BackwardParams& call = params.call;
  const int64_t row_units = call.N * ceil_div(call.L, kExactTileRows),
                key_units = call.N / call.key_group * ceil_div(call.S, kExactTileRows);
  const cudaError_t status =
      launch_kernel(split_half_exact_rows_kernel, {std::min(row_units, most_ctas()), kExactThreads}, stream, params);
  if (status != cudaSuccess) return status;
  return launch_kernel(split_half_exact_keys_kernel, {std::min(key_units, most_ctas()), kExactThreads}, stream, params);
}

}  // namespace attention_ext
