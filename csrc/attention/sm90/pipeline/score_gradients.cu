// Backward by wgmma (Hopper), first kernel of a slice: P and dS (score_gradients.cuh).
//
// Grid: persistent CTAs, one an SM; 384 threads. Shared memory: WgmmaTile::Shared, Tickets. Registers: 240 a consumer thread.
#include "attention/sm90/pipeline/score_gradients.cuh"
#include "gemm/sm90/tickets.cuh"

namespace attention_ext {
namespace {

struct ScoreGradientsPlan : Ticket, ScorePlan {};

template <class T>
using ScoreGradientsShared = SharedWithTickets<ScoreGradientsTile<T>, ScoreGradientsPlan>;

template <class T, bool kModified>
__global__ void __launch_bounds__(ScoreGradientsTile<T>::kThreads, 1)
    score_gradients_kernel(const __grid_constant__ ScoreGradientsParams params, const __grid_constant__ ScoreGradientsMaps maps,
                           const __grid_constant__ ScoreTiles<ScoreGradientsTile<T>, true> tiles) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Tile = ScoreGradientsTile<T>;
  using Plan = ScoreGradientsPlan;
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  const ScoreGradients<T, kModified> work = {params, tiles};
  const unsigned end = static_cast<unsigned>(params.slice.batch_count) * tiles.of_matrix();
  auto& shared = *reinterpret_cast<ScoreGradientsShared<T>*>(s_bytes);
  run_by_tickets<Tile>(
      shared, params.ticket, end, false, [&](Plan& plan) { work.make_plan(plan, plan.tile); },
      [&](StepLoader<Tile>& loader, Plan& plan) { work.load(loader, maps, plan); },
      [&](StepMultiplier<Tile>& multiplier, const Plan& plan, uint32_t, int) {
        if (!work.multiply(multiplier, shared.tile, plan)) multiplier.let_follow();
      });
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
  return launch_persistent<Tile, sizeof(ScoreGradientsShared<T>)>(
      modified(params) ? score_gradients_kernel<T, true> : score_gradients_kernel<T, false>, count, stream, params, maps,
      tiles);
}

}  // namespace

cudaError_t launch_score_gradients(const ScoreGradientsParams& params, cudaStream_t stream) {
  return dispatch_half_type(params.type, [&](auto element) { return launch_typed<decltype(element)>(params, stream); });
}

}  // namespace attention_ext
