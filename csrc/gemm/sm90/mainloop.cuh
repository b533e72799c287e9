// The main loop of matrix products by wgmma (Hopper): C[kM, kN] = sum over k of A[m, k] * B[k, n], tile after tile.
//
// 1. Persistent CTAs, one an SM, take every gridDim.x-th tile. One thread loads steps of 64 in k with TMA, kStages buffers
//    ahead, on into the next tile while the epilogue of this one runs.
// 2. Two warpgroups multiply 64 rows each by wgmma and hold the result in registers. float32 operands come as two half terms
//    (split_half, Tile::kTerms is 2) and take three products, whose sum over Tile::kPromoted of k is added to the result in float,
//    as Tensor Cores truncate what they add.
// 3. They hand it to the epilogue.
//
// `Work` is what differs between kernels:
//   tiles()                       how many there are
//   aim(tile)                     Place of a tile: at least `steps` (0: left out) and the positions `a` and `b` of its first boxes;
//                                 with Tile::kColumnsB also `last_rows`, the rows of B that count in the last step
//   fetch(place, row)             what the epilogue needs of a thread's two rows, `row` and `row` + 8, read ahead of it
//   store(place, row, fetched, product, s_strip)   the epilogue
//   promotion(place, row, fetched, product)   with two terms: how parts are added to the result, PlainPromotion or another; sets
//                                 what the result begins with; one more argument of store
// Finding a tile's place takes divisions, some hundred cycles: it is done one tile ahead, during the products of this one.
#pragma once

#include "core/device_info.h"
#include "core/launch.cuh"
#include "device/sm80/cp_async.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tma.cuh"
#include "device/sm90/warpgroup.cuh"
#include "device/sm90/wgmma.cuh"
#include "gemm/sm90/clear_rows.cuh"
#include "gemm/sm90/strip.cuh"
#include "gemm/sm90/tile.cuh"
#include "gemm/tile_order.cuh"

namespace attention_ext {

// Barriers of bar.sync; 0 is __syncthreads.
constexpr int kBarrierSkew = 1;
constexpr int kBarrierRows = 2;  // and 3: one of the warpgroups that multiply

// Parts are added as they are.
struct PlainPromotion {
  PlainPromotion() = default;
  template <int kCount>
  __device__ __forceinline__ explicit PlainPromotion(float (&product)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) product[i] = 0.0f;
  }
  // Before the parts of a step.
  template <int kCount>
  __device__ __forceinline__ void begin_step(int, float (&)[kCount]) {}
  template <int kCount>
  __device__ __forceinline__ void add(float (&product)[kCount], const float (&part)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) product[i] += part[i];
  }
};

struct WgmmaMaps {
  CUtensorMap a, b;  // boxes of kM rows; of kN rows, or of 64 rows with kColumnsB. The half terms are the innermost batch dim
};

template <class Tile, class Work>
__device__ __forceinline__ void load_tiles(const Work& work, const WgmmaMaps& maps, typename Tile::Shared& shared) {
  using T = typename Tile::T;
  RingPlace<Tile::kStages> ring;
  const int64_t tiles = work.tiles();
  auto place = work.aim(blockIdx.x);
  const auto load_step = [&] {
    mbarrier_wait(shared_address(&shared.empty[ring.slot]), ring.parity ^ 1);
    const uint32_t full = shared_address(&shared.full[ring.slot]);
    mbarrier_arrive_expect_bytes(full, Tile::kTerms * (Tile::kM + Tile::kN) * Tile::kK * sizeof(T));
    auto& stage = shared.stage[ring.slot];
#pragma unroll
    for (int term = 0; term < Tile::kTerms; ++term) {
      if constexpr (Tile::kTerms == 2) place.a.at[2] = place.b.at[2] = term;
      tma_load(shared_address(stage.a[term]), &maps.a, place.a, full);
      if constexpr (Tile::kColumnsB) {
        TensorPosition box = place.b;
#pragma unroll
        for (int i = 0; i < Tile::kColumnBoxes; ++i) {
          tma_load(shared_address(stage.b[term]) + i * 64 * Tile::kK * sizeof(T), &maps.b, box, full);
          box.at[0] += 64;
        }
      } else {
        tma_load(shared_address(stage.b[term]), &maps.b, place.b, full);
      }
    }
    place.b.at[Tile::kColumnsB ? 1 : 0] += Tile::kK;
    place.a.at[0] += Tile::kK;
    ring.advance();
  };
#pragma unroll 1
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    if (place.steps > 0) load_step();
    const auto next = work.aim(tile + gridDim.x < tiles ? tile + gridDim.x : tile);
#pragma unroll 1
    for (int step = 1; step < place.steps; ++step) load_step();
    place = next;
  }
}

// What a warpgroup's products of one step read: descriptors of its rows of A and of B.
template <class Tile>
struct StepOperands {
  uint64_t a[Tile::kTerms], b[Tile::kTerms];
  __device__ __forceinline__ StepOperands(typename Tile::Stage& stage, int consumer) {
    using T = typename Tile::T;
#pragma unroll
    for (int term = 0; term < Tile::kTerms; ++term) {
      a[term] = matrix_descriptor(shared_address(stage.a[term]) + consumer * 64 * Tile::kK * sizeof(T), 1024, 0);
      b[term] = matrix_descriptor(shared_address(stage.b[term]), 1024, 64 * Tile::kK * sizeof(T));
    }
  }
  // sums += A's term . B's term over `kCount` of the step's k, from `begin` on.
  template <int kCount = Tile::kK>
  __device__ __forceinline__ void multiply(float (&sums)[Tile::kN / 2], int term_a, int term_b, bool fresh,
                                           int begin = 0) const {
    using T = typename Tile::T;
#pragma unroll
    for (int k = begin; k < begin + kCount; k += 16) {
      const int b_offset = (Tile::kColumnsB ? k * 64 : k) * sizeof(T);
      wgmma<T, Tile::kColumnsB>(sums, a[term_a] + k * sizeof(T) / 16, b[term_b] + b_offset / 16, fresh && k == begin);
    }
  }
};

template <class Tile, class Work>
__device__ __forceinline__ void multiply_tiles(const Work& work, typename Tile::Shared& shared, int consumer) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, row = consumer * 64 + warp * 16 + lane / 4;
  const uint32_t s_strip = Tile::strip_address(shared, consumer * 4 + warp);
  const auto release = [&](int slot) {
    if (lane == 0) mbarrier_arrive(shared_address(&shared.empty[slot]));
  };
  RingPlace<Tile::kStages> ring;
  float product[Tile::kN / 2];
  // The second warpgroup stays kSkew steps later than the first: the epilogue of one then overlaps products of the other, which has
  // the Tensor Cores to itself.
  bool leads = consumer == 0;
  if (!leads) barrier_sync(kBarrierSkew, 128 * Tile::kConsumers);
  const auto let_follow = [&](int step, int steps) {
    if (leads && (step == Tile::kSkew - 1 || step == steps - 1)) {
      barrier_sync(kBarrierSkew, 128 * Tile::kConsumers);
      leads = false;
    }
  };
  const int64_t tiles = work.tiles();
  auto place = work.aim(blockIdx.x);
  auto fetched = work.fetch(place, row);
#pragma unroll 1
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    auto next = place;
    auto next_fetched = fetched;
    const auto look_ahead = [&] {
      if (tile + gridDim.x >= tiles) return;
      next = work.aim(tile + gridDim.x);
      next_fetched = work.fetch(next, row);
    };
    if (place.steps == 0) {
      look_ahead();
    } else if constexpr (Tile::kTerms == 2) {
      auto promotion = work.promotion(place, row, fetched, product);
      for (int step = 0; step < place.steps; ++step) {
        mbarrier_wait(shared_address(&shared.full[ring.slot]), ring.parity);
        const StepOperands<Tile> operands(shared.stage[ring.slot], consumer);
#pragma unroll
        for (int k = 0; k < Tile::kK; k += Tile::kPromoted) {
          constexpr int kPart = Tile::kPromoted;
          const bool last = k + kPart == Tile::kK;
          float part[Tile::kN / 2];
          wgmma_fence();
          operands.template multiply<kPart>(part, 1, 0, true, k);  // the small ones first, while there is little to truncate
          operands.template multiply<kPart>(part, 0, 1, false, k);
          operands.template multiply<kPart>(part, 0, 0, false, k);
          wgmma_commit();
          if (k == 0) promotion.begin_step(step, product);
          if (last) let_follow(step, place.steps);
          if (last && step == place.steps - 1) look_ahead();
          wgmma_wait<0>();
          pin_registers(part);
          if (last) release(ring.slot);
          promotion.add(product, part);
        }
        ring.advance();
      }
      work.store(place, row, fetched, product, s_strip, promotion);
    } else {
      int previous = 0;
      const auto multiply_step = [&](int step) {
        mbarrier_wait(shared_address(&shared.full[ring.slot]), ring.parity);
        const StepOperands<Tile> operands(shared.stage[ring.slot], consumer);
        wgmma_fence();
        operands.multiply(product, 0, 0, step == 0);
        wgmma_commit();
        wgmma_wait<1>();  // the step before this one is done
        if (step > 0) release(previous);
        let_follow(step, place.steps);
        previous = ring.slot;
        ring.advance();
      };
      if constexpr (Tile::kColumnsB) {
        const int whole = place.last_rows < Tile::kK ? place.steps - 1 : place.steps;
        for (int step = 0; step < whole; ++step) multiply_step(step);
        if (whole < place.steps) {
          mbarrier_wait(shared_address(&shared.full[ring.slot]), ring.parity);
          const uint32_t s_b = shared_address(shared.stage[ring.slot].b[0]);
          clear_rows(s_b, Tile::kColumnBoxes, Tile::kK, place.last_rows, kBarrierRows + consumer);
          multiply_step(whole);
        }
      } else {
        for (int step = 0; step < place.steps; ++step) multiply_step(step);
      }
      look_ahead();
      wgmma_wait<0>();
      pin_registers(product);
      release(previous);
      work.store(place, row, fetched, product, s_strip);
    }
    place = next;
    fetched = next_fetched;
  }
  if (leads) barrier_sync(kBarrierSkew, 128 * Tile::kConsumers);  // every tile was left out
}

struct NothingToDo {
  __device__ __forceinline__ void operator()() const {}
};

// A kernel of Tile::kThreads: load() in one thread, multiply(consumer) in each of the two warpgroups, each with its registers, and
// plan() in one thread of another warp of the warpgroup that loads.
template <class Tile, class Load, class Multiply, class Plan = NothingToDo>
__device__ __forceinline__ void split_warpgroups(typename Tile::Shared& shared, Load load, Multiply multiply, Plan plan = {}) {
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // uniform, as the compiler should know
  init_ring(shared.full, shared.empty, 4 * Tile::kConsumers);
  mbarrier_fence_init();
  __syncthreads();
  if (warpgroup == Tile::kConsumers) {
    give_registers<Tile::kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);  // uniform as well
    if (warp == 0) {
      if (elect_thread()) load();
    } else if (warp == 1) {
      if (elect_thread()) plan();
    }
  } else {
    take_registers<Tile::kConsumerRegisters>();
    multiply(warpgroup);
  }
}

// The kernel of Work<Tile>{params}.
template <template <class> class Work, class Tile, class Params>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    wgmma_kernel(const __grid_constant__ Params params, const __grid_constant__ WgmmaMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const Work<Tile> work = {params};
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  typename Tile::Shared& shared = *reinterpret_cast<typename Tile::Shared*>(s_bytes);
  if (threadIdx.x == Tile::kThreads - 1) {
    tma_prefetch_map(&maps.a);
    tma_prefetch_map(&maps.b);
  }
  split_warpgroups<Tile>(
      shared, [&] { load_tiles<Tile>(work, maps, shared); },
      [&](int consumer) { multiply_tiles<Tile>(work, shared, consumer); });
#else
  __trap();  // never launched: an image for another card must not return what nobody wrote
#endif
}

// One CTA for every SM, or fewer where there are fewer tiles, of a kernel whose CTAs take one after another.
template <class Tile, size_t kSharedBytes = sizeof(typename Tile::Shared), class... Parameters>
cudaError_t launch_persistent(void (*kernel)(Parameters...), int64_t tiles, cudaStream_t stream,
                              const Parameters&... parameters) {
  static_assert(kSharedBytes <= 227 * 1024, "an SM gives a CTA 227 KB of shared memory");
  const int64_t sms = current_device_info().sms;
  return launch_kernel(kernel, {tiles < sms ? tiles : sms, Tile::kThreads, kSharedBytes}, stream, parameters...);
}

template <template <class> class Work, class Tile, class Params>
cudaError_t launch_wgmma_tiles(const Params& params, const WgmmaMaps& maps, int64_t tiles, cudaStream_t stream) {
  return launch_persistent<Tile>(wgmma_kernel<Work, Tile, Params>, tiles, stream, params, maps);
}

}  // namespace attention_ext
