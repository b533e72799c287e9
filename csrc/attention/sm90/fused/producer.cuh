// The loading side of the fused forward: one thread for each consumer's ring, in the order in which the consumer multiplies, and
// one for the query tiles. They run ahead of the consumers, into the next tile of work.
#pragma once

#include "attention/params.h"
#include "attention/sm90/fused/work.cuh"
#include "attention/sm90/pieces/group_maps.cuh"
#include "device/sm80/cp_async.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tma.cuh"

namespace attention_ext {

// Loads the keys and values of one consumer warpgroup. One thread.
template <class Tile, bool kGeneral>
class FusedProducer {
 public:
  __device__ __forceinline__ FusedProducer(const ForwardParams& p, const GroupMaps& maps, typename Tile::Shared& shared,
                                           int consumer)
      : p_(p), maps_(maps), shared_(shared), work_(shared.work[Tile::kConsumers + consumer]), consumer_(consumer) {}

  __device__ __forceinline__ void run(const FusedOrder& order) {
#pragma unroll 1
    for (uint32_t tile = blockIdx.x; tile < order.tiles; tile += gridDim.x) {
      work_.template init<Tile, kGeneral>(p_, order, tile);
      set_batch(shared_.key[consumer_], p_.batch, p_.key, work_.n_group * work_.group);
      set_batch(shared_.value[consumer_], p_.batch, p_.value, work_.n_group * work_.group);
      BlockWalk<Tile, kGeneral> walk(work_, shared_.visible, consumer_);
#pragma unroll 1
      for (; !walk.done(); walk.advance()) {
        load_keys(walk.block());
        if (walk.ordinal() > 0) load_values(walk.previous(), work_.first_column);
        load_values(walk.block(), work_.first_column);
      }
      if (walk.other_has_last()) load_values(walk.previous(), work_.first_column);
      if constexpr (Tile::kPasses) {
        if (order.columns == Tile::kShareColumns) continue;
#pragma unroll 1
        for (int column = Tile::kShareColumns; column < p_.Ev; column += Tile::kShareColumns) {
#pragma unroll 1
          for (int owner = 0; owner < Tile::kConsumers; ++owner) {
            const BlockWalk<Tile, kGeneral> of_owner(work_, shared_.visible, owner);
            if (!of_owner.done()) load_values(of_owner.block(), column);
          }
        }
      }
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
    TensorPosition box = shared_.key[consumer_];
    box.at[1] = block * Tile::kN;
#pragma unroll 1
    for (box.at[0] = 0; box.at[0] < p_.E; box.at[0] += Tile::kStep) {
      const uint32_t full = claim(Tile::kN * Tile::kStep * sizeof(typename Tile::T));
      tma_load(shared_address(shared_.ring[consumer_][place_.slot]), &maps_.key, box, full);
      place_.advance();
    }
  }

  // Of the output's columns from `first_column` on, this warpgroup's.
  __device__ __forceinline__ void load_values(int block, int first_column) {
    constexpr uint32_t kStepBytes = Tile::kValueKeys * Tile::kStep * sizeof(typename Tile::T);
    const int begin = first_column + consumer_ * Tile::kValueSteps * Tile::kStep;
    const int end = min(begin + Tile::kValueSteps * Tile::kStep, static_cast<int>(p_.Ev));
    const int steps = max(end - begin + Tile::kStep - 1, 0) / Tile::kStep;
    const int slots = work_.value_slots(block, Tile::kValueKeys);  // read once: no refill waits for shared memory
    TensorPosition box = shared_.value[consumer_];
    box.at[1] = block * Tile::kN;
#pragma unroll 1
    for (int slot = 0; slot < slots; ++slot) {
      const uint32_t full = claim(steps * kStepBytes);
      const uint32_t s_slot = shared_address(shared_.ring[consumer_][place_.slot]);
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        box.at[0] = begin + step * Tile::kStep;
        tma_load(s_slot + step * kStepBytes, &maps_.value, box, full);
      }
      box.at[1] += Tile::kValueKeys;
      place_.advance();
    }
  }

  const ForwardParams& p_;
  const GroupMaps& maps_;
  typename Tile::Shared& shared_;
  FusedWork& work_;  // this thread's own, in shared memory as the batch coordinates of the boxes are: 40 registers are few
  const int consumer_;
  RingPlace<Tile::kSlots> place_;
};

// Loads the query tiles; columns from E on and queries from L on become zeros. One thread.
template <class Tile, bool kGeneral>
__device__ __forceinline__ void load_queries(const ForwardParams& p, const GroupMaps& maps, typename Tile::Shared& shared,
                                             const FusedOrder& order) {
  using T = typename Tile::T;
  FusedWork& work = shared.work[2 * Tile::kConsumers];
  const int steps = (static_cast<int>(p.E) + Tile::kStep - 1) / Tile::kStep;
  const uint32_t full = shared_address(&shared.query_full);
  uint32_t parity = 0;
#pragma unroll 1
  for (uint32_t tile = blockIdx.x; tile < order.tiles; tile += gridDim.x) {
    work.template init<Tile, kGeneral>(p, order, tile);
    TensorPosition box;
    set_rows(box, p, p.query, work);
    mbarrier_wait(shared_address(&shared.query_empty), parity ^ 1);
    parity ^= 1;
    mbarrier_arrive_expect_bytes(full, steps * fused_tile_rows(work.group) * Tile::kStep * sizeof(T));
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      box.at[0] = step * Tile::kStep;
      tma_load(shared_address(shared.query[step]), &maps.query, box, full);
    }
  }
}

}  // namespace attention_ext
