// Backward by wgmma (Hopper), first kernel of a slice: P and dS (score_gradients.cuh).
//
// Grid: persistent CTAs, one an SM; 384 threads. Shared memory: WgmmaTile::Shared. Registers: 240 a consumer thread.
#include "attention/sm90/pipeline/score_gradients.cuh"

namespace attention_ext {
namespace {

template <class T, bool kModified>
__global__ void __launch_bounds__(ScoreGradientsTile<T>::kThreads, 1)
    score_gradients_kernel(const __grid_constant__ ScoreGradientsParams params, const __grid_constant__ ScoreGradientsMaps maps,
                           const __grid_constant__ ScoreTiles<ScoreGradientsTile<T>, true> tiles) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Tile = ScoreGradientsTile<T>;
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  const ScoreGradients<T, kModified> work = {params, tiles};
  const unsigned end = static_cast<unsigned>(params.slice.batch_count) * tiles.of_matrix();
  const auto load = [&](StepLoader<Tile>& loader) {
#pragma unroll 1
    for (unsigned tile = blockIdx.x; tile < end; tile += gridDim.x) {
      const ScorePlace at = work.place(tile);
      if (!at.hidden) work.load(loader, maps, at);
    }
  };
  const auto multiply = [&](StepMultiplier<Tile>& multiplier, uint32_t s_strip, int row) {
#pragma unroll 1
    for (unsigned tile = blockIdx.x; tile < end; tile += gridDim.x) work.multiply(multiplier, tile, s_strip, row);
  };
  run_warpgroups<Tile>(*reinterpret_cast<typename Tile::Shared*>(s_bytes), load, multiply);
#else
  __trap();  // never launched: an image for another card must not return what nobody wrote
#endif
}

template <class T>
cudaError_t launch_typed(const ScoreGradientsParams& params, cudaStream_t stream) {
  using Tile = ScoreGradientsTile<T>;
  ScoreGradientsMaps maps;
  const cudaError_t status = make_score_gradients_maps<T>(maps, params);
  if (status != cudaSuccess) return status;
  const ScoreTiles<Tile, true> tiles = score_gradients_tiles<T>(params);
  const int64_t count = params.slice.batch_count * tiles.of_matrix();
  return launch_persistent<Tile>(modified(params) ? score_gradients_kernel<T, true> : score_gradients_kernel<T, false>, count,
                                 stream, params, maps, tiles);
}

}  // namespace

cudaError_t launch_score_gradients(const ScoreGradientsParams& params, cudaStream_t stream) {
  return dispatch_half_type(params.type, [&](auto element) { return launch_typed<decltype(element)>(params, stream); });
}

}  // namespace attention_ext
