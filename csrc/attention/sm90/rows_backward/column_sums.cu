// Where the walk of a tile of keys is cut (plan/sm90_column_parts.h): adds what its parts have left of dK and dV, and rounds once.
//
// A thread takes four columns of a key's dK or dV, of all parts in their order, four parts' reads under way together. Keys that no
// query sees are not its own (unseen_keys.cuh). Memory bounds it: (4 parts + 2) bytes an element, what parts leave mostly from L2.
// Grid: one CTA of 256 threads per 256 quads of the flattened (key heads of the launch, seen keys, quads of both). No shared
// memory.
#include "attention/sm90/rows_backward/rows_backward.h"
#include "core/dispatch.h"
#include "core/launch.cuh"
#include "device/common/batch.cuh"
#include "device/common/types.cuh"

namespace attention_ext {
namespace {

constexpr int kCtaThreads = 256;

template <class T>
__global__ void __launch_bounds__(kCtaThreads)
    column_sums_kernel(const __grid_constant__ RowsBackwardParams p, int64_t key_heads) {
  const int64_t key_quads = (p.E + 3) / 4, quads = key_quads + (p.Ev + 3) / 4;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kCtaThreads + threadIdx.x;
  int64_t row, quad, head, key;
  divide(at, quads, row, quad);
  divide(row, p.seen_keys, head, key);
  if (head >= key_heads) return;

  float sums[4] = {};
  const int64_t parts = p.cut.heads * p.cut.blocks, step = p.seen_keys * quads;
  const float4* g_part = reinterpret_cast<const float4*>(p.column_parts) + head * parts * step + key * quads + quad;
#pragma unroll 4
  for (int64_t part = 0; part < parts; ++part) {
    const float4 four = g_part[part * step];
    sums[0] += four.x;
    sums[1] += four.y;
    sums[2] += four.z;
    sums[3] += four.w;
  }
  const bool of_keys = quad < key_quads;
  const MatrixView& view = of_keys ? p.grad_key : p.grad_value;
  const int64_t first = batch_offset(p.batch, view, (p.cut.first + head) * p.key_group, 0) + key * view.row_stride;
  store_quad<T>(view.data, first, p.wide_grads, static_cast<int>(4 * (of_keys ? quad : quad - key_quads)),
                static_cast<int>(of_keys ? p.E : p.Ev), view.col_stride, view.vector, sums);
}

}  // namespace

cudaError_t launch_column_sums(const RowsBackwardParams& params, int64_t key_heads, cudaStream_t stream) {
  const int64_t quads = ceil_div(params.E, 4) + ceil_div(params.Ev, 4);
  const LaunchShape shape = {ceil_div(key_heads * params.seen_keys * quads, kCtaThreads), kCtaThreads};
  return dispatch_half_type(params.type, [&](auto element) {
    return launch_kernel(column_sums_kernel<decltype(element)>, shape, stream, params, key_heads);
  });
}

}  // namespace attention_ext
