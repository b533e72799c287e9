// Combines what the pieces of a row's keys left: out = sum of f_i O_i / sum of f_i s_i with f_i = exp(reference_i - the largest),
// where piece i has left O_i, the sum s_i of its weights and the reference of both (flash decoding).
//
// Grid: a CTA a row, of more than 256 columns one for each 128 of them; 256 threads. A thread takes a piece's statistics; then four
// columns of every kLanes-th piece, where kLanes is 256 by the threads that the columns take. All additions are in a fixed order.
// Shared memory: 5 KB.
#include "attention/sm90/pieces/pieces.cuh"
#include "attention/softmax/online_softmax.cuh"
#include "core/dispatch.h"
#include "core/launch.cuh"
#include "device/common/batch.cuh"
#include "device/common/types.cuh"
#include "device/sm90/dependent_launch.cuh"

namespace attention_ext {
namespace {

constexpr int kThreads = 256;
static_assert(kMostPieces <= kThreads, "a thread takes a piece's statistics");

// kColumns: threads for a CTA's columns, four each.
template <class T, int kColumns>
__global__ void __launch_bounds__(kThreads)
    combine_pieces_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ KeyPieces pieces, float unit) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  launch_dependents();
  constexpr int kWarps = kThreads / 32, kLanes = kThreads / kColumns;
  constexpr int kAtOnce = 8;  // pieces whose reads are under way together
  __shared__ float s_factor[kThreads], s_warp[2][kWarps];
  __shared__ float4 s_out[kThreads];
  const uint32_t shares = (pieces.pitch + 4 * kColumns - 1) / (4 * kColumns), share = blockIdx.x % shares;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread / kColumns,
            col = (share * kColumns + thread % kColumns) * 4;
  const uint32_t group = p.key.group, rows = static_cast<uint32_t>(p.L) * group;
  const uint32_t of_launch = blockIdx.x / shares / rows, row = blockIdx.x / shares % rows;
  const uint32_t n = (pieces.first_group + of_launch) * group + row % group;
  const int64_t first = static_cast<int64_t>(of_launch) * pieces.count * rows + row;  // the first piece's row
  const auto place = [&](int piece) { return first + static_cast<int64_t>(piece) * rows; };
  const int64_t query = row / group, out_row = batch_offset(p.batch, p.out, n, 0) + query * p.out.row_stride;
  const int64_t lse = batch_offset(p.batch, p.lse, n, 0) + query * p.lse.row_stride;
  wait_for_prerequisites();

  const float2 mine = thread < pieces.count ? pieces.statistics[place(thread)] : make_float2(negative_infinity(0.0f), 0.0f);
  const auto has_row = [&](int piece) { return piece < pieces.count && col < pieces.pitch; };
  float4 held[kAtOnce];
  const auto read = [&](int from) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int piece = from + i * kLanes;
      if (has_row(piece)) held[i] = *reinterpret_cast<const float4*>(pieces.out + place(piece) * pieces.pitch + col);
    }
  };
  read(lane);  // while the statistics come

  float reference = warp_max(mine.x);
  if (thread % 32 == 0) s_warp[0][warp] = reference;
  __syncthreads();  // the warps' maxima are there
#pragma unroll
  for (int w = 0; w < kWarps; ++w) reference = maximum(reference, s_warp[0][w]);
  const float subtract = reference == negative_infinity(0.0f) ? 0.0f : reference;
  const float factor = mine.x == reference ? 1.0f : exp2_difference(mine.x, subtract, unit * kLog2E);
  s_factor[thread] = factor;
  const float part = warp_sum(mine.y == 0.0f ? 0.0f : factor * mine.y);
  if (thread % 32 == 0) s_warp[1][warp] = part;
  __syncthreads();  // the factors and the warps' sums are there
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += s_warp[1][w];

  float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
  for (int from = lane; from < pieces.count; from += kAtOnce * kLanes) {
    if (from != lane) read(from);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int piece = from + i * kLanes;
      if (!has_row(piece)) continue;
      const float f = s_factor[piece];
      out.x += f * held[i].x;
      out.y += f * held[i].y;
      out.z += f * held[i].z;
      out.w += f * held[i].w;
    }
  }
  s_out[thread] = out;
  __syncthreads();  // what the lanes have added is there
  if (thread == 0 && share == 0) static_cast<float*>(p.lse.data)[lse] = log_sum_exp(__fmul_rn(reference, unit), sum);
  if (lane > 0 || col >= p.Ev) return;
#pragma unroll
  for (int other = 1; other < kLanes; ++other) {
    const float4 more = s_out[other * kColumns + thread];
    out.x += more.x;
    out.y += more.y;
    out.z += more.z;
    out.w += more.w;
  }
  const float keep_scale = p.dropout.seed != nullptr ? static_cast<float>(p.dropout.keep_scale) : 1.0f;
  const float row_factor = sum == 0.0f ? 0.0f : keep_scale / sum;
  const float values[4] = {out.x * row_factor, out.y * row_factor, out.z * row_factor, out.w * row_factor};
  store_quad(static_cast<T*>(p.out.data) + out_row, col, static_cast<int>(p.Ev), p.out.col_stride, p.out.vector, values);
#else
  __trap();  // never launched: an image for another card must not return what nobody wrote
#endif
}

}  // namespace

cudaError_t combine_pieces(const ForwardParams& params, const KeyPieces& pieces, int64_t groups, float unit,
                           cudaStream_t stream) {
  const bool one = pieces.pitch <= 256;  // CTA a row
  LaunchShape shape = {groups * params.key.group * params.L * (one ? 1 : ceil_div(pieces.pitch, 128)), kThreads};
  shape.early = true;  // starts while the last pieces run, and waits for them
  return dispatch_half_type(params.type, [&](auto element) {
    using T = decltype(element);
    auto* kernel = pieces.pitch <= 64            ? combine_pieces_kernel<T, 16>
                   : pieces.pitch <= 128 || !one ? combine_pieces_kernel<T, 32>
                                                 : combine_pieces_kernel<T, 64>;
    return launch_kernel(kernel, shape, stream, params, pieces, unit);
  });
}

}  // namespace attention_ext
