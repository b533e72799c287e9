// Backward by wgmma (Hopper), first kernel of a slice: P and dS (score_gradients.cuh).
//
// Grid: persistent CTAs, one an SM, alone or in clusters of two; 384 threads. Shared memory: WgmmaTile::Shared. Registers: 240
// a consumer thread.
#include "attention/sm90/pipeline/score_gradients.cuh"

namespace attention_ext {
namespace {

template <class Tile, bool kModified>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    score_gradients_kernel(const __grid_constant__ ScoreGradientsParams params, const __grid_constant__ ScoreGradientsMaps maps,
                           const __grid_constant__ ScoreTiles<Tile, true> tiles) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  const ScoreGradients<Tile, kModified> work = {params, tiles};
  const auto end = [&] {
    return static_cast<unsigned>(forget_object(params).slice.batch_count) * forget_object(tiles).of_matrix();
  };
  const auto load = [&](StepLoader<Tile>& loader) {
#pragma unroll 1
    for (unsigned tile = cta_of_grid() / Tile::kCtas; tile < end(); tile += ctas_of_grid() / Tile::kCtas) {
      const ScorePlace at = work.cluster_place(tile);
      if (at.hidden) continue;
      work.load_first(loader, maps, at);
      work.load_second(loader, maps, tile);
    }
  };
  const auto multiply = [&](StepMultiplier<Tile>& multiplier, uint32_t s_strip, int row) {
#pragma unroll 1
    for (unsigned tile = cta_of_grid() / Tile::kCtas; tile < end(); tile += ctas_of_grid() / Tile::kCtas) {
      work.multiply(multiplier, tile, s_strip, row);
    }
  };
  run_warpgroups<Tile>(*reinterpret_cast<typename Tile::Shared*>(s_bytes), load, multiply);
#else
  __trap();  // never launched: an image for another card must not return what nobody wrote
#endif
}

template <class Tile>
cudaError_t launch_tile(const ScoreGradientsParams& params, cudaStream_t stream) {
  ScoreGradientsMaps maps;
  const cudaError_t status = make_score_gradients_maps<Tile>(maps, params);
  if (status != cudaSuccess) return status;
  const ScoreTiles<Tile, true> tiles = score_gradients_tiles<Tile>(params);
  const int64_t count = params.slice.batch_count * tiles.of_matrix();
  return launch_persistent<Tile>(modified(params) ? score_gradients_kernel<Tile, true> : score_gradients_kernel<Tile, false>,
                                 count, stream, params, maps, tiles);
}

}  // namespace

cudaError_t launch_score_gradients(const ScoreGradientsParams& params, cudaStream_t stream) {
  return dispatch_half_type(params.type, [&](auto element) {
    using T = decltype(element);
    return params.pairs ? launch_tile<ScoreGradientsTile<T, 2>>(params, stream)
                        : launch_tile<ScoreGradientsTile<T, 1>>(params, stream);
  });
}

}  // namespace attention_ext
