// Rows of the linear layer's result -> softmax of ((x - center) * factor + shift) * scale, features' own numbers: batch norm, scale
// and softmax in one pass over memory.
//
// 1. One warp (rows up to 1024; 512 of double) or one CTA takes a row, 16 bytes a thread and read.
// 2. Rows up to 8192 (4096 of double) stay in registers: maximum by warp shuffles, exponentials, sum by warp shuffles. Wider rows
//    are read three times.
// 3. As torch.softmax: NaN where a row has a NaN or an infinity, or nothing but -inf.
// Grid: one CTA of 256 threads per 8 rows (warp per row) or per row.
#include "core/arithmetic.h"
#include "core/dispatch.h"
#include "core/launch.cuh"
#include "core/tensors.h"
#include "device/common/math.cuh"
#include "device/common/row_reduce.cuh"
#include "device/common/types.cuh"
#include "linear/params.h"

namespace attention_ext {
namespace {

template <class T_, int kThreadsPerRow_, bool kStreaming_>
struct NormSoftmaxTile {
  using T = T_;
  using Acc = Accumulator<T>;
  static constexpr int kThreadsPerRow = kThreadsPerRow_;
  static constexpr bool kStreaming = kStreaming_;        // rows wider than one chunk
  static constexpr int kQuads = sizeof(T) == 8 ? 4 : 8;  // that a thread holds at a time; doubles take two registers each
  static constexpr int kChunk = kThreadsPerRow * kQuads * 4;
  static constexpr int kRowsPerCta = kSoftmaxThreads / kThreadsPerRow;
};

template <class Tile>
__global__ void __launch_bounds__(kSoftmaxThreads, 2) norm_softmax_kernel(const __grid_constant__ NormSoftmaxParams p) {
  using T = typename Tile::T;
  using Acc = typename Tile::Acc;
  __shared__ Acc s_partial[2][kSoftmaxThreads / 32];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * Tile::kRowsPerCta + threadIdx.x / Tile::kThreadsPerRow;
  if (row >= p.M) return;  // whole warps of a warp-per-row CTA, never part of a row
  const int thread = threadIdx.x % Tile::kThreadsPerRow, cols = static_cast<int>(p.N);
  const bool vector = cols % 4 == 0;  // every row begins on a boundary of its quads
  const Acc* g_row = static_cast<const Acc*>(p.linear) + row * p.N;
  const Acc *g_center = static_cast<const Acc*>(p.center), *g_factor = static_cast<const Acc*>(p.factor),
            *g_shift = static_cast<const Acc*>(p.shift), *g_scale = static_cast<const Acc*>(p.scale);
  T* g_out = static_cast<T*>(p.out) + row * p.N;

  Acc x[Tile::kQuads][4];
  const auto load_chunk = [&](int chunk) {
#pragma unroll
    for (int quad = 0; quad < Tile::kQuads; ++quad) {
      const int col = chunk + (quad * Tile::kThreadsPerRow + thread) * 4;
      Acc center[4], factor[4], shift[4], scale[4];
      load_quad<Acc>(x[quad], g_row, col, cols, 1, vector);
      load_quad<Acc>(center, g_center, col, cols, 1, vector);
      load_quad<Acc>(factor, g_factor, col, cols, 1, vector);
      load_quad<Acc>(shift, g_shift, col, cols, 1, vector);
      load_quad<Acc>(scale, g_scale, col, cols, 1, vector);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const Acc normed = (x[quad][e] - center[e]) * factor[e] + shift[e];
        x[quad][e] = col + e < cols ? normed * scale[e] : negative_infinity(Acc(0));
      }
    }
  };
  const auto largest_of_chunk = [&](Acc largest) {
#pragma unroll
    for (int quad = 0; quad < Tile::kQuads; ++quad) {
#pragma unroll
      for (int e = 0; e < 4; ++e) largest = maximum(largest, x[quad][e]);
    }
    return largest;
  };
  const auto sum_of_chunk = [&](int chunk, Acc largest) {  // x becomes its exponentials
    Acc sum = 0;
#pragma unroll
    for (int quad = 0; quad < Tile::kQuads; ++quad) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int col = chunk + (quad * Tile::kThreadsPerRow + thread) * 4 + e;
        x[quad][e] = exp_difference<Acc>(x[quad][e], largest);
        if (col < cols) sum += x[quad][e];  // after the row's end -inf, which in a row of -inf is NaN
      }
    }
    return sum;
  };
  const auto store_chunk = [&](int chunk, Acc sum) {
#pragma unroll
    for (int quad = 0; quad < Tile::kQuads; ++quad) {
      const int col = chunk + (quad * Tile::kThreadsPerRow + thread) * 4;
#pragma unroll
      for (int e = 0; e < 4; ++e) x[quad][e] = x[quad][e] / sum;
      store_quad(g_out, col, cols, 1, vector, x[quad]);
    }
  };

  if constexpr (!Tile::kStreaming) {
    load_chunk(0);
    const Acc largest = reduce_row<Tile, Maximum>(largest_of_chunk(negative_infinity(Acc(0))), s_partial[0]);
    store_chunk(0, reduce_row<Tile, Sum>(sum_of_chunk(0, largest), s_partial[1]));
  } else {
    Acc largest = negative_infinity(Acc(0)), sum = 0;
    for (int chunk = 0; chunk < cols; chunk += Tile::kChunk) {
      load_chunk(chunk);
      largest = largest_of_chunk(largest);
    }
    largest = reduce_row<Tile, Maximum>(largest, s_partial[0]);
    for (int chunk = 0; chunk < cols; chunk += Tile::kChunk) {
      load_chunk(chunk);
      sum += sum_of_chunk(chunk, largest);
    }
    sum = reduce_row<Tile, Sum>(sum, s_partial[1]);
    for (int chunk = 0; chunk < cols; chunk += Tile::kChunk) {
      load_chunk(chunk);
      sum_of_chunk(chunk, largest);
      store_chunk(chunk, sum);
    }
  }
}

template <class Tile>
cudaError_t launch_tile(const NormSoftmaxParams& params, cudaStream_t stream) {
  const int64_t ctas = ceil_div(params.M, Tile::kRowsPerCta);
  if (ctas > kMaxCtas) return cudaErrorInvalidConfiguration;
  norm_softmax_kernel<Tile><<<static_cast<unsigned>(ctas), kSoftmaxThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

template <class T>
cudaError_t launch_typed(const NormSoftmaxParams& params, cudaStream_t stream) {
  using Narrow = NormSoftmaxTile<T, 32, false>;
  using Wide = NormSoftmaxTile<T, kSoftmaxThreads, false>;
  if (params.N <= Narrow::kChunk) return launch_tile<Narrow>(params, stream);
  if (params.N <= Wide::kChunk) return launch_tile<Wide>(params, stream);
  return launch_tile<NormSoftmaxTile<T, kSoftmaxThreads, true>>(params, stream);
}

}  // namespace

cudaError_t launch_norm_softmax(const NormSoftmaxParams& params, cudaStream_t stream) {
  if (params.M == 0 || params.N == 0) return cudaSuccess;
  if (params.N > 0x7fff0000) return cudaErrorInvalidValue;  // columns are counted in int, a chunk ahead
  return dispatch_type(params.type, [&](auto element) { return launch_typed<decltype(element)>(params, stream); });
}

}  // namespace attention_ext
