// Backward by wgmma (Hopper), second kernel of a slice: the three gradients (gradients.cuh).
//
// Order of tiles: of equally long ones head by head, so that dK and dQ read dS together; else the longest first. A CTA takes the
// next one when it is free.
// Grid: persistent CTAs, one an SM; 384 threads. Shared memory: WgmmaTile::Shared, Tickets. Registers: 232 a consumer thread.
#include "attention/sm90/pipeline/gradients.cuh"
#include "core/arithmetic.h"
#include "core/dispatch.h"
#include "gemm/sm90/tickets.cuh"

namespace attention_ext {
namespace {

template <class Tile>
struct GradientsPlan : Ticket, GradientPlan<Tile> {};

template <class Tile>
using GradientsShared = SharedWithTickets<Tile, GradientsPlan<Tile>>;

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    gradients_kernel(const __grid_constant__ GradientsParams params, const __grid_constant__ GradientsMaps maps,
                     const __grid_constant__ GradientTiles<Tile> list) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  using Plan = GradientsPlan<Tile>;
  const Gradients<Tile> work = {params, list};
  run_by_tickets<Tile>(
      *reinterpret_cast<GradientsShared<Tile>*>(s_bytes), params.ticket, list.all(), params.added != nullptr,
      [&](Plan& plan) { work.make_plan(plan, plan.tile, params.slice.batch_begin); },
      [&](StepLoader<Tile>& loader, Plan& plan) { work.load(loader, maps, plan); },
      [&](StepMultiplier<Tile>& multiplier, const Plan& plan, uint32_t, int row) {
        float product[Tile::kN / 2];
        work.multiply(multiplier, plan.at, product);
        work.write(plan, row, product);
      });
#else
  __trap();  // never launched: an image for another card must not return what nobody wrote
#endif
}

template <class Tile>
cudaError_t launch_tile(const GradientsParams& params, cudaStream_t stream) {
  GradientsMaps maps;
  const cudaError_t status = make_gradients_maps<Tile>(maps, params);
  if (status != cudaSuccess) return status;
  const GradientTiles<Tile> list(params.slice, params.sequence.causal, params.sum_heads, params.of[kGradKey].width,
                                 params.of[kGradValue].width, params.of_rows, params.of_keys);
  return launch_persistent<Tile, sizeof(GradientsShared<Tile>)>(gradients_kernel<Tile>, list.all(), stream, params, maps, list);
}

// Tiles of 192 columns where they pay for fewer that do not exist, as in values.cu.
template <class T>
cudaError_t launch_typed(const GradientsParams& params, cudaStream_t stream) {
  const auto narrow = [](int64_t width) { return ceil_div(width, 192) == ceil_div(width, 256); };
  return narrow(params.of[kGradKey].width) && narrow(params.of[kGradValue].width)
             ? launch_tile<WgmmaTile<T, true, 192>>(params, stream)
             : launch_tile<WgmmaTile<T, true>>(params, stream);
}

}  // namespace

cudaError_t launch_gradients(const GradientsParams& params, cudaStream_t stream) {
  return dispatch_half_type(params.type, [&](auto element) { return launch_typed<decltype(element)>(params, stream); });
}

}  // namespace attention_ext
