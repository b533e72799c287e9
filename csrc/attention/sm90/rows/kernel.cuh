// The row kernels: fused forward for Hopper up to head dim 256, out = softmax(scale * Q K^T + mask) V without scores in memory.
//
// A CTA takes 128 or 192 query rows (of all heads of a group together: row r is query r / G of head r % G), 64 for each consumer
// warpgroup, and walks over blocks of keys from the last one to the first. A warpgroup alone does all of its rows:
//   S_j = Q K_j^T begins, O += P_{j+1} V_{j+1} begins | S_j is there: softmax, P_j | O is there: rescaled; P_j as its next operand
// P stays in registers: a result of wgmma lies there as an operand of it does. Products of one warpgroup run under the softmax of
// the others: where they are short, up to head dim 192, warpgroups take turns at issuing them, so that they stay out of step.
// A fourth or third warpgroup's threads load: keys, values and up to head dim 128 a bias in rings of their own, and the query
// tiles. Blocks of keys that a mask hides from all of the tile's rows are left out (mark.cuh).
// CTAs stay and take tile after tile (RowsOrder); the next tile's operands come while this one ends.
// Where rows are few and keys many, a tile is up to 64 rows and one piece of the keys, for one warpgroup. It leaves what it has
// summed in the workspace, and combine_pieces makes the output of that.
// The next kernel of the stream may start at once, and this one may have started before the one in front has ended: until
// wait_for_prerequisites nothing is read or written but shared memory and parameters.
// Shared memory: RowsTile::Shared. Registers: 160, 232 or 240 a consumer thread (O 32 to 128, S 40 or 64, P 20 or 32); at most 255
// where there is one consumer.
#pragma once

#include "attention/params.h"
#include "attention/sm90/rows/consumer.cuh"
#include "attention/sm90/rows/producer.cuh"
#include "device/sm90/dependent_launch.cuh"

namespace attention_ext {

template <class Tile, RowsKind kKind>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    rows_forward_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ RowsMaps maps,
                        const __grid_constant__ RowsMarks marks, RowsOrder order) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  launch_dependents();
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  typename Tile::Shared& shared = *reinterpret_cast<typename Tile::Shared*>(s_bytes);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // uniform, as the compiler should know
  if (threadIdx.x == Tile::kThreads - 1) {
    tma_prefetch_map(&maps.query);
    tma_prefetch_map(&maps.key);
    tma_prefetch_map(&maps.value);
    if constexpr (Tile::bias_ring(kKind)) tma_prefetch_map(&maps.bias);
  }
  init_ring(shared.key_full, shared.key_empty, 4 * Tile::kConsumers);
  init_ring(shared.value_full, shared.value_empty, 4 * Tile::kConsumers);
  init_ring(shared.query_full, shared.query_empty, 4 * Tile::kConsumers);
  init_slots(shared.query_rest_empty, 4 * Tile::kConsumers);
  if constexpr (Tile::bias_ring(kKind)) init_ring(shared.bias_full, shared.bias_empty, 128 * Tile::kConsumers);
  mbarrier_fence_init();
  wait_for_prerequisites();  // all threads: each that touches global memory must have waited itself
  __syncthreads();
  if (warpgroup == Tile::kConsumers) {
    if constexpr (Tile::kConsumers > 1) give_registers<Tile::producer_registers(kKind)>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);  // uniform as well
    if (!elect_thread()) return;
    if (warp == 0) {
      RowsProducer<Tile, kKind>(p, maps, marks, shared).run(order);
    } else if (warp == 1) {
      load_query_rows<Tile, kKind>(p, maps, shared, order);
    }
  } else {
    if constexpr (Tile::kConsumers > 1) take_registers<Tile::consumer_registers(kKind)>();
    RowsConsumer<Tile, kKind>(p, shared, warpgroup).run(order);
  }
#else
  __trap();  // never launched: an image for another card must not return what nobody wrote
#endif
}

}  // namespace attention_ext
