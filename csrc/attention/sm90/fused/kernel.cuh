// Fused forward for Hopper: out = softmax(scale * Q K^T + mask) V without scores in memory, any L and S.
//
// A CTA takes 64 query rows (of all heads of a group together: row r is query r / G of head r % G) and walks over blocks of 128
// keys. Two consumer warpgroups own the blocks in turn and half of Ev each:
//   1. the owner of block j computes S = Q K_j^T (64 x 128) in registers,
//   2. softmaxes it: the running maximum of each row, weights P_j = exp(S - maximum) to shared memory for both,
//   3. each warpgroup adds P_j V_j to its half of O (64 x Ev / 2) in registers.
// While one warpgroup is in its softmax the other one multiplies: warpgroup 0 does S_0 | softmax, P_0 V_0 | S_2 | softmax, P_1 V_1,
// P_2 V_2 | ..., warpgroup 1 S_1 | softmax, P_0 V_0, P_1 V_1 | S_3 ... A third warpgroup's threads load, one of them a ring of 16
// KB slots for each consumer, in the order in which it multiplies: 128 keys x 64 of E, or 32 keys x half of Ev.
// Blocks of keys that none of the CTA's rows sees are left out.
// Where rows are few and keys many, a tile is up to 64 rows and one piece of the keys. It leaves what it has summed in the
// workspace, and combine_pieces makes the output of that.
// The next kernel of the stream may start at once, and this one may have started before the one in front has ended: until
// wait_for_prerequisites nothing is read or written but shared memory and parameters.
// Grid: one CTA per 64 rows of a group, row tiles of a group adjacent (they share keys and values in L2), causal: longest first.
// Shared memory: FusedTile::Shared. Registers: 232 a consumer thread (O 128, S 64), 40 a producer thread.
#pragma once

#include "attention/params.h"
#include "attention/sm90/fused/consumer.cuh"
#include "attention/sm90/fused/producer.cuh"
#include "device/sm90/dependent_launch.cuh"

namespace attention_ext {

// With a mask a CTA takes one tile (gridDim.x is their number), since the blocks that it marks as visible are those of one.
template <class Tile, bool kGeneral>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    fused_forward_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ GroupMaps maps,
                         const __grid_constant__ FusedOrder order) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  launch_dependents();
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  typename Tile::Shared& shared = *reinterpret_cast<typename Tile::Shared*>(s_bytes);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // uniform, as the compiler should know
  if (threadIdx.x == Tile::kThreads - 1) {
    tma_prefetch_map(&maps.query);
    tma_prefetch_map(&maps.key);
    tma_prefetch_map(&maps.value);
  }
#pragma unroll
  for (int consumer = 0; consumer < Tile::kConsumers; ++consumer) init_ring(shared.full[consumer], shared.empty[consumer], 4);
  init_ring(shared.weights_ready, shared.weights_free, 128, 32);
  if (threadIdx.x == 0) {
    mbarrier_init(shared_address(&shared.query_full), 1);
    mbarrier_init(shared_address(&shared.query_empty), 4 * Tile::kConsumers);
  }
  mbarrier_fence_init();
  if constexpr (kGeneral) {
    for (int i = threadIdx.x; i < kTrackedBlocks / 32; i += Tile::kThreads) {
      shared.visible[i] = p.mask_type == MaskType::kNone ? 0xffffffffu : 0u;
    }
  }
  wait_for_prerequisites();  // all threads: each that touches global memory must have waited itself
  __syncthreads();
  if (warpgroup == Tile::kConsumers) {
    if constexpr (kGeneral) {
      FusedWork work;
      work.init<Tile, kGeneral>(p, order, blockIdx.x);
      visit_mask<typename Tile::T>(p.mask, p.mask_type,
                                   [&](auto* g_mask) { mark_visible_blocks<Tile>(p, work, g_mask, shared.visible); });
    }
    give_registers<Tile::kProducerRegisters>();
    if constexpr (kGeneral) barrier_sync(kBarrierMarked, Tile::kThreads);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);  // uniform as well
    if (!elect_thread()) return;
    if (warp < Tile::kConsumers) {
      FusedProducer<Tile, kGeneral>(p, maps, shared, warp).run(order);
    } else if (warp == Tile::kConsumers) {
      load_queries<Tile, kGeneral>(p, maps, shared, order);
    }
  } else {
    take_registers<Tile::kConsumerRegisters>();
    FusedConsumer<Tile, kGeneral>(p, shared, warpgroup).run(order);
  }
#else
  __trap();  // never launched: an image for another card must not return what nobody wrote
#endif
}

}  // namespace attention_ext
