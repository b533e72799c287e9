// Rows of float32 attention that two half terms are not enough for, made anew in float on CUDA cores: out and log-sum-exp by the
// online softmax. What calls for it is rare (docs/kernels/sm90_split_half.md), so this is short, not fast.
//
// One CTA at a time takes 16 rows of a matrix and goes through their keys 64 at a time: scores, weights, then out, which waits in
// memory, 64 columns at a time.
// Grid: CTAs that stay and look for such rows. 256 threads: 16 a row. Shared memory: 31 KB.
#include "attention/sm90/split_half/split_half.h"
#include "attention/softmax/online_softmax.cuh"
#include "attention/visibility/score_modifier.cuh"
#include "core/arithmetic.h"
#include "core/device_info.h"
#include "core/launch.cuh"
#include "device/common/batch.cuh"
#include "device/common/random.cuh"
#include "device/sm90/dependent_launch.cuh"

namespace attention_ext {
namespace {

constexpr int kThreads = 256, kRowThreads = 16, kKeys = 64, kChunk = 32, kCols = 64;
constexpr int kKeysOfThread = kKeys / kRowThreads, kColsOfThread = kCols / kRowThreads;

// Whether what the terms leave out of a matrix's scores may be more than independent errors of 2^-22 an element of query and key.
__device__ __forceinline__ bool needs_exact(const SplitHalfExactParams& p, int64_t n) {
  const int64_t key_group = p.call.key.group, value_group = p.call.value.group;
  const SplitHalfFacts query = p.query[n], key = p.key[n / key_group * key_group],
                       value = p.value[n / value_group * value_group];
  const float left_out = fabsf(static_cast<float>(p.call.scale)) * kLog2E *
                         (__uint_as_float(query.left_out) * __uint_as_float(key.norm) +
                          __uint_as_float(key.left_out) * __uint_as_float(query.norm));
  const bool enough = left_out <= 0x1p-22f * sqrtf(static_cast<float>(p.call.E));  // false for NaN
  return !enough || query.exact != 0 || key.exact != 0 || value.exact != 0;
}

__global__ void __launch_bounds__(kThreads, 1) split_half_exact_kernel(const __grid_constant__ SplitHalfExactParams p) {
  __shared__ float s_query[kExactRows][kChunk + 1], s_key[kKeys][kChunk + 1], s_weight[kExactRows][kKeys],
      s_value[kKeys][kCols];
  __shared__ bool s_found[kThreads];
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  wait_for_prerequisites();
#endif
  const ForwardParams& call = p.call;
  const int64_t groups = (call.L + kExactRows - 1) / kExactRows;
  const int thread_row = threadIdx.x / kRowThreads, thread = threadIdx.x % kRowThreads;
  const auto make_unit = [&](int64_t unit) {
    const int64_t n = unit / groups;
    const int first_row = static_cast<int>(unit - n * groups) * kExactRows, row = first_row + thread_row;
    const bool exists = row < call.L;
    const KeyRange range = key_range(call.sequence, n, call.S);
    const int end = range.end_of_tile(first_row, kExactRows);
    const float* g_query = static_cast<const float*>(call.query.data) + batch_offset(call.batch, call.query, n, 0);
    const float* g_key = static_cast<const float*>(call.key.data) + batch_offset(call.batch, call.key, n, 0);
    const float* g_value = static_cast<const float*>(call.value.data) + batch_offset(call.batch, call.value, n, 0);
    float* g_out = static_cast<float*>(call.out.data) + batch_offset(call.batch, call.out, n, 0) + row * call.out.row_stride;
    const int64_t mask_offset = call.mask_type == MaskType::kNone ? 0 : batch_offset(call.batch, call.mask, n, 0);
    // visit(this thread's columns in turn)
    const auto for_each_column = [&](int first, auto visit) {
#pragma unroll
      for (int i = 0; i < kColsOfThread; ++i) {
        const int64_t col = first + thread + i * kRowThreads;
        if (exists && col < call.Ev) visit(i, g_out[col * call.out.col_stride]);
      }
    };

    float max = negative_infinity(0.0f), sum = 0.0f;
#pragma unroll 1
    for (int first_key = 0; first_key < end; first_key += kKeys) {
      float x[kKeysOfThread] = {};
#pragma unroll 1
      for (int e = 0; e < call.E; e += kChunk) {
        __syncthreads();  // the chunk before this one has been read
        for (int i = threadIdx.x; i < kKeys * kChunk; i += kThreads) {
          const int of = i / kChunk, col = e + i % kChunk;
          const bool in = col < call.E;
          s_key[of][i % kChunk] =
              in && first_key + of < end ? g_key[(first_key + of) * call.key.row_stride + col * call.key.col_stride] : 0.0f;
          if (of < kExactRows) {
            s_query[of][i % kChunk] = in && first_row + of < call.L
                                          ? g_query[(first_row + of) * call.query.row_stride + col * call.query.col_stride]
                                          : 0.0f;
          }
        }
        __syncthreads();                 // the chunk is there
        float part[kKeysOfThread] = {};  // a sum of sums: its error does not grow with E
        for (int k = 0; k < kChunk; ++k) {
#pragma unroll
          for (int i = 0; i < kKeysOfThread; ++i) {
            part[i] = fmaf(s_query[thread_row][k], s_key[thread + i * kRowThreads][k], part[i]);
          }
        }
#pragma unroll
        for (int i = 0; i < kKeysOfThread; ++i) x[i] += part[i];
      }
      float block_max = max;
#pragma unroll
      for (int i = 0; i < kKeysOfThread; ++i) {
        float score[1] = {x[i]};
        make_scores<float>(score, static_cast<float>(call.scale), call.mask, call.mask_type, mask_offset, range,
                           exists ? row : first_row, first_key + thread + i * kRowThreads);
        x[i] = score[0];
        block_max = maximum(block_max, x[i]);
      }
      block_max = warp_max<kRowThreads>(block_max);
      const float reference = block_max == negative_infinity(0.0f) ? 0.0f : block_max, factor = expf(max - reference);
      float block_sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kKeysOfThread; ++i) {
        const int key = first_key + thread + i * kRowThreads;
        float weight = expf(x[i] - reference);
        block_sum += weight;
        if (call.dropout.seed != nullptr &&
            (kept_of_quad(call.dropout, *call.dropout.seed, n, row, key / 4) >> key % 4 & 1) == 0) {
          weight = 0.0f;
        }
        s_weight[thread_row][thread + i * kRowThreads] = weight;
      }
      sum = sum * factor + warp_sum<kRowThreads>(block_sum);
      max = block_max;
#pragma unroll 1
      for (int col = 0; col < call.Ev; col += kCols) {
        __syncthreads();  // the columns before these have been read
        for (int i = threadIdx.x; i < kKeys * kCols; i += kThreads) {
          const int key = first_key + i / kCols, of = col + i % kCols;
          s_value[i / kCols][i % kCols] =
              key < end && of < call.Ev ? g_value[key * call.value.row_stride + of * call.value.col_stride] : 0.0f;
        }
        __syncthreads();  // they and the weights are there
        float out[kColsOfThread] = {};
        for (int key = 0; key < kKeys; ++key) {
#pragma unroll
          for (int i = 0; i < kColsOfThread; ++i) {
            out[i] = fmaf(s_weight[thread_row][key], s_value[key][thread + i * kRowThreads], out[i]);
          }
        }
        for_each_column(col, [&](int i, float& stored) { stored = first_key == 0 ? out[i] : fmaf(stored, factor, out[i]); });
      }
    }
    const float kept = call.dropout.seed != nullptr ? static_cast<float>(call.dropout.keep_scale) : 1.0f;
#pragma unroll 1
    for (int col = 0; col < call.Ev; col += kCols) {
      for_each_column(col, [&](int, float& stored) { stored = sum == 0.0f ? 0.0f : stored / sum * kept; });
    }
    if (thread == 0 && exists) {
      static_cast<float*>(call.lse.data)[batch_offset(call.batch, call.lse, n, 0) + row * call.lse.row_stride] =
          log_sum_exp(max, sum);
    }
  };

  // Every gridDim.x-th unit is this CTA's. All threads look at once; what some of them find is made by all.
  const int64_t units = call.N * groups, stride = gridDim.x;
#pragma unroll 1
  for (int64_t first = blockIdx.x; first < units; first += kThreads * stride) {
    const int64_t mine = first + threadIdx.x * stride;
    const bool found = mine < units && (p.marks[mine] != 0 || needs_exact(p, mine / groups));
    if (__syncthreads_or(found) == 0) continue;
    s_found[threadIdx.x] = found;
    __syncthreads();  // what all have found is there
#pragma unroll 1
    for (int i = 0; i < kThreads; ++i) {
      if (s_found[i]) make_unit(first + i * stride);
    }
    __syncthreads();  // and has been read
  }
}

}  // namespace

cudaError_t launch_split_half_exact(const SplitHalfExactParams& params, cudaStream_t stream) {
  const int64_t units = params.call.N * ceil_div(params.call.L, kExactRows), most = 8 * current_device_info().sms;
  LaunchShape shape = {std::min(units, most), kThreads};
  shape.early = true;
  return launch_kernel(split_half_exact_kernel, shape, stream, params);
}

}  // namespace attention_ext
