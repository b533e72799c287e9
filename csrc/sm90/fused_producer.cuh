// The loading side of the fused forward: one thread for each consumer's ring, in the order in which the consumer multiplies.
#pragma once

#include "../device/cp_async.cuh"
#include "../device/mbarrier.cuh"
#include "../device/tma.cuh"
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
      : p_(p), maps_(maps), shared_(shared), work_(shared.work), consumer_(consumer) {
    set_batch(key_, p.batch, p.key, work_.n_group * work_.group);
    set_batch(value_, p.batch, p.value, work_.n_group * work_.group);
  }

  __device__ __forceinline__ void run() {
    BlockWalk<Tile, kGeneral> walk(shared_, consumer_);
    for (; !walk.done(); walk.advance()) {
      load_keys(walk.block());
      if (walk.ordinal() > 0) load_values(walk.previous());
      load_values(walk.block());
    }
    if (walk.other_has_last()) load_values(walk.previous());
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
    const int begin = consumer_ * Tile::kValueSteps * Tile::kStep;
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
  const FusedWork& work_;
  const int consumer_;
  RingPlace<Tile::kSlots> place_;
  TensorPosition key_, value_;
};

}  // namespace attention_ext
