// The loading side of the fused forward: one thread for each consumer's ring, in the order in which the consumer multiplies, and two
// warps for the query tiles. They run ahead of the consumers, into the next tile of work.
#pragma once

#include "../device/cp_async.cuh"
#include "../device/mbarrier.cuh"
#include "../device/tma.cuh"
#include "../device/warpgroup.cuh"
#include "../device/wgmma.cuh"
#include "fused_work.cuh"

namespace attention_ext {

struct FusedMaps {
  CUtensorMap key, value;  // (batch dims..., keys, head dim), five dims
};

// Loads the keys and values of one consumer warpgroup. One thread.
template <class Tile, bool kGeneral>
class FusedProducer {
 public:
  __device__ __forceinline__ FusedProducer(const ForwardParams& p, const FusedMaps& maps, typename Tile::Shared& shared,
                                           int consumer)
      : p_(p),
        maps_(maps),
        shared_(shared),
        work_(shared.work[Tile::kConsumers + consumer]),
        key_(shared.key[consumer]),
        value_(shared.value[consumer]),
        consumer_(consumer) {}

  __device__ __forceinline__ void run(uint32_t tiles) {
#pragma unroll 1
    for (uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      work_.init(p_, tile, Tile::kShareColumns);
      set_batch(key_, p_.batch, p_.key, work_.n_group * work_.group);
      set_batch(value_, p_.batch, p_.value, work_.n_group * work_.group);
      BlockWalk<kGeneral> walk(work_, shared_.visible, consumer_);
#pragma unroll 1
      for (; !walk.done(); walk.advance()) {
        load_keys(walk.block());
        if (walk.ordinal() > 0) load_values(walk.previous());
        load_values(walk.block());
      }
      if (walk.other_has_last()) load_values(walk.previous());
    }
  }

 private:
  // Waits until the next slot is free and says how many bytes will come.
  __device__ __forceinline__ uint32_t claim(uint32_t bytes) {
    mbarrier_wait(shared_address(&shared_.empty[consumer_][place_.slot]), place_.parity ^ 1);
    const uint32_t full = shared_address(&shared_.full[consumer_][place_.slot]);
    mbarrier_arrive_expect_bytes(full, bytes);
    return full;
  }

  __device__ __forceinline__ void load_keys(int block) {
    key_.at[1] = block * Tile::kN;
    for (key_.at[0] = 0; key_.at[0] < p_.E; key_.at[0] += Tile::kStep) {
      const uint32_t full = claim(Tile::kN * Tile::kStep * sizeof(typename Tile::T));
      tma_load(shared_address(shared_.ring[consumer_][place_.slot]), &maps_.key, key_, full);
      place_.advance();
    }
  }

  __device__ __forceinline__ void load_values(int block) {
    constexpr uint32_t kStepBytes = Tile::kValueKeys * Tile::kStep * sizeof(typename Tile::T);
    const int begin = work_.first_column + consumer_ * Tile::kValueSteps * Tile::kStep;
    const int end = min(begin + Tile::kValueSteps * Tile::kStep, static_cast<int>(p_.Ev));
    const int steps = max(end - begin + Tile::kStep - 1, 0) / Tile::kStep;
    value_.at[1] = block * Tile::kN;
    for (int slot = 0; slot < work_.value_slots(block, Tile::kValueKeys); ++slot) {
      const uint32_t full = claim(steps * kStepBytes);
      uint32_t s_step = shared_address(shared_.ring[consumer_][place_.slot]);
      for (value_.at[0] = begin; value_.at[0] < end; value_.at[0] += Tile::kStep) {
        tma_load(s_step, &maps_.value, value_, full);
        s_step += kStepBytes;
      }
      value_.at[1] += Tile::kValueKeys;
      place_.advance();
    }
  }

  const ForwardParams& p_;
  const FusedMaps& maps_;
  typename Tile::Shared& shared_;
  // This thread's own, in shared memory: 40 registers are few.
  FusedWork& work_;
  TensorPosition &key_, &value_;
  const int consumer_;
  RingPlace<Tile::kSlots> place_;
};

// Loads the query tiles: rows that do not exist and columns from E on as zeros. Two warps.
template <class Tile>
__device__ __forceinline__ void load_queries(const ForwardParams& p, typename Tile::Shared& shared, uint32_t tiles) {
  using T = typename Tile::T;
  constexpr int kChunk = 16 / sizeof(T), kChunks = Tile::kStep / kChunk;
  static_assert(kChunks == 8, "eight threads share a row");
  const T* g_query = static_cast<const T*>(p.query.data);
  const int thread = threadIdx.x % 64, lane = thread % 32, chunk = lane % kChunks;
  FusedWork& work = shared.work[2 * Tile::kConsumers + thread / 32];
  uint32_t parity = 0;
#pragma unroll 1
  for (uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    __syncwarp();  // the tile before is no longer looked at
    if (lane == 0) work.init(p, tile, Tile::kShareColumns);
    __syncwarp();
    // A warp's threads take four rows out of eight, eight times. To find a row's place takes divisions, so every lane finds one.
    const int first_row = thread / 32 * 4;
    const int64_t found = work.offset_of_row(p.batch, p.query, first_row + lane % 4 + lane / 4 * 8);
    mbarrier_wait(shared_address(&shared.query_empty), parity ^ 1);
    parity ^= 1;
#pragma unroll 1
    for (int pass = 0; pass < Tile::kM / 8; ++pass) {
      const int row = first_row + lane / kChunks + pass * 8;
      const T* g_row = g_query + __shfl_sync(0xffffffffu, found, lane / kChunks + pass * 4);
      uint32_t s_chunk = shared_address(shared.query[0]) + swizzled(row, chunk);
#pragma unroll 1
      for (int col = chunk * kChunk; col - chunk * kChunk < p.E; col += Tile::kStep) {
        const int valid = row < work.rows ? max(0, min(static_cast<int>(p.E) - col, kChunk)) : 0;
        cp_async_16_zero_filled(s_chunk, valid > 0 ? g_row + col : g_query, valid * static_cast<int>(sizeof(T)));
        s_chunk += Tile::kM * Tile::kStep * sizeof(T);
      }
    }
    cp_async_commit();
    cp_async_wait<0>();
    fence_async_proxy();
    mbarrier_arrive(shared_address(&shared.query_full));
  }
}

}  // namespace attention_ext
