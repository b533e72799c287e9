// The gradient of a mask: dS = P (dP - delta), summed over the score matrices that share a matrix of the mask, and over queries or
// keys where it has one row or column. No score leaves registers.
//
// A CTA takes tiles of 128 queries by 128 keys of the gradient, 64 by 128 for each of two consumer warpgroups, and walks over a
// tile's terms, in one order: S = Q K^T and dP = dO V^T by wgmma, P from the log-sum-exp, and P (dP - delta) is added to the tile's
// sum, in float, in registers. The mask's tile is the same for all terms: it is read once, and waits in shared memory. At the end
// the sum is rounded to the mask's dtype. Every element is written, zeros where nothing is seen. A warp of a third warpgroup loads.
// Tiles too few to fill the card are shared: each of several CTAs takes a run of the terms and leaves its sum in float;
// mask_sums_kernel adds these, a CTA a line of 128, in one order.
// Grid: CTAs stay, and take every gridDim.x-th item, a tile or a share of one. Neighbours share queries or keys, which L2 keeps.
// Shared memory: MaskGradTile::Shared, 217 KB. Registers: 232 a consumer thread (S 64, dP 64, sums 64), 40 of the producer.
#include "attention/pipeline/stage.h"
#include "attention/sm90/rows_backward/launch.cuh"
#include "attention/sm90/rows_backward/mask_consumer.cuh"
#include "core/launch.cuh"

namespace attention_ext {
namespace {

template <class Tile>
__global__ void __launch_bounds__(kRowsBackwardThreads, 1)
    mask_tiles_kernel(const __grid_constant__ RowsBackwardParams p, const __grid_constant__ RowsBackwardMaps maps,
                      const __grid_constant__ MaskTiles tiles) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  typename Tile::Shared& shared = *reinterpret_cast<typename Tile::Shared*>(s_bytes);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // uniform, as the compiler should know
  init_ring(shared.full, shared.empty, 4 * kRowsBackwardConsumers);
  init_ring(shared.term_full, shared.term_empty, Tile::kConsumerThreads);
  mbarrier_fence_init();
  __syncthreads();
  if (warpgroup == kRowsBackwardConsumers) {
    give_registers<rows_backward_producer_registers(true)>();
    if (__shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0) == 0) MaskProducer<Tile>(p, maps, tiles, shared).run();
  } else {
    take_registers<rows_backward_consumer_registers(true)>();
    MaskConsumer<Tile>(p, tiles, shared, warpgroup).run();
  }
#else
  __trap();  // never launched: an image for another card must not return what nobody wrote
#endif
}

constexpr int kSumWarps = 8;

// Adds the parts of a line of 128: a warp every eighth part, then the warps' sums. Grid: a CTA a line of each tile.
template <class Stored>
__global__ void __launch_bounds__(32 * kSumWarps)
    mask_sums_kernel(const __grid_constant__ RowsBackwardParams p, const __grid_constant__ MaskTiles tiles, uint32_t lines) {
  __shared__ float4 s_sums[kSumWarps][32];
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, tile = blockIdx.x / lines, of_tile = blockIdx.x % lines;
  float sum[4] = {};
  const auto add = [&](const float4& four) {
    sum[0] += four.x;
    sum[1] += four.y;
    sum[2] += four.z;
    sum[3] += four.w;
  };
#pragma unroll 4
  for (uint32_t split = warp; split < tiles.splits; split += kSumWarps) {
    const int64_t at = (static_cast<int64_t>(tile) * tiles.splits + split) * lines + of_tile;
    add(*reinterpret_cast<const float4*>(tiles.parts + at * kMaskTile + lane * 4));
  }
  s_sums[warp][lane] = {sum[0], sum[1], sum[2], sum[3]};
  __syncthreads();
  if (warp > 0) return;
#pragma unroll
  for (int other = 1; other < kSumWarps; ++other) add(s_sums[other][lane]);
  const MaskLine<Stored> line(p, tiles, MaskItem(tiles, tile * tiles.splits), static_cast<int>(of_tile));
  if (!tiles.rows_kept && !tiles.cols_kept) {  // one number
    const float all = warp_sum(sum[0] + sum[1] + sum[2] + sum[3]);
    if (lane == 0) *line.g_data = from_accumulator<Stored>(all);
    return;
  }
  store_quad<Stored>(line.g_data, line.first + static_cast<int>(lane) * 4, line.end, line.stride,
                     tiles.cols_kept && p.mask_grad.vector, sum);
}

template <class T, class Stored>
cudaError_t launch_tiles_of_mask(const RowsBackwardParams& params, const MaskTiles& tiles, int64_t lines, cudaStream_t stream) {
  using Tile = MaskGradTile<T, Stored>;
  RowsBackwardMaps maps;
  cudaError_t status = make_maps(maps, params, Tile::kM, Tile::kN);
  if (status != cudaSuccess) return status;
  const LaunchShape shape = {std::min<int64_t>(tiles.items, current_device_info().sms), kRowsBackwardThreads,
                             sizeof(typename Tile::Shared)};
  status = launch_kernel(mask_tiles_kernel<Tile>, shape, stream, params, maps, tiles);
  if (status != cudaSuccess || tiles.parts == nullptr) return status;
  const LaunchShape sums = {tiles.items / tiles.splits * lines, 32 * kSumWarps};
  return launch_kernel(mask_sums_kernel<Stored>, sums, stream, params, tiles, static_cast<uint32_t>(lines));
}

}  // namespace

MaskTilesSizes mask_tiles_sizes(const BackwardParams& params) {
  MaskTilesSizes sizes = {};
  sizes.matrices = sizes.sharers = 1;
  for (int dim = 0; dim < params.batch.count; ++dim) {
    (params.mask_grad.batch_stride[dim] != 0 ? sizes.matrices : sizes.sharers) *= params.batch.size[dim];
  }
  sizes.row_tiles = ceil_div(params.L, kMaskTile);
  sizes.key_tiles = ceil_div(params.S, kMaskTile);
  sizes.rows_kept = params.mask_grad.row_stride != 0 || params.L == 1;
  sizes.cols_kept = params.mask_grad.col_stride != 0 || params.S == 1;
  sizes.steps = ceil_div(params.E, 64) + ceil_div(params.Ev, 64);
  return sizes;
}

cudaError_t launch_mask_tiles(const RowsBackwardParams& params, cudaStream_t stream) {
  const MaskTilesSizes sizes = mask_tiles_sizes(params);
  MaskTiles tiles;
  tiles.splits = static_cast<uint32_t>(params.mask_splits);
  tiles.items = static_cast<uint32_t>(sizes.tiles()) * tiles.splits;
  tiles.terms = static_cast<uint32_t>(sizes.terms());
  tiles.row_tiles = sizes.rows_kept ? static_cast<int>(sizes.row_tiles) : 1;
  tiles.key_tiles = sizes.cols_kept ? static_cast<int>(sizes.key_tiles) : 1;
  tiles.summed_rows = sizes.rows_kept ? 1 : static_cast<uint32_t>(sizes.row_tiles);
  tiles.summed_keys = sizes.cols_kept ? 1 : static_cast<uint32_t>(sizes.key_tiles);
  tiles.rows_kept = sizes.rows_kept;
  tiles.cols_kept = sizes.cols_kept;
  tiles.parts = params.mask_parts;
  return dispatch_half_type(params.type, [&](auto element) {
    using T = decltype(element);
    return params.mask_type == MaskType::kFloat ? launch_tiles_of_mask<T, float>(params, tiles, sizes.lines(), stream)
                                                : launch_tiles_of_mask<T, T>(params, tiles, sizes.lines(), stream);
  });
}

}  // namespace attention_ext
