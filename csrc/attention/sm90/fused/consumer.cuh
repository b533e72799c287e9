// The multiplying side of the fused forward: what one consumer warpgroup does with its blocks of keys and its half of Ev.
#pragma once

#include "attention/params.h"
#include "attention/sm90/fused/epilogue.cuh"
#include "attention/sm90/fused/weights.cuh"
#include "attention/sm90/fused/work.cuh"
#include "attention/softmax/online_softmax.cuh"
#include "attention/visibility/score_modifier.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/warpgroup.cuh"
#include "device/sm90/wgmma.cuh"
#include "gemm/sm90/clear_rows.cuh"

namespace attention_ext {

// One consumer warpgroup. kGeneral: there is a mask, dropout or a length of keys, or a scale that is not positive.
template <class Tile, bool kGeneral>
class FusedConsumer {
 public:
  using T = typename Tile::T;

  __device__ __forceinline__ FusedConsumer(const ForwardParams& p, typename Tile::Shared& shared, int consumer)
      : p_(p), shared_(shared), work_(shared.work[consumer]), consumer_(consumer) {
    row_ = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    col_ = threadIdx.x % 4 * 2;
  }

  __device__ __forceinline__ void run(const FusedOrder& order) {
    if constexpr (kGeneral) barrier_sync(kBarrierMarked, Tile::kThreads);
    uint32_t query_parity = 0;
    const bool passes = Tile::kPasses && order.columns > Tile::kShareColumns;
#pragma unroll 1
    for (uint32_t tile = blockIdx.x; tile < order.tiles; tile += gridDim.x) {
      begin_tile(order, tile);
      mbarrier_wait(shared_address(&shared_.query_full), query_parity);
      query_parity ^= 1;
      const int other = 1 - consumer_;
      BlockWalk<Tile, kGeneral> walk(work_, shared_.visible, consumer_);
      // A vote, of threads that agree: the compiler then keeps addresses in uniform registers, where it would not know they are.
      if (__any_sync(0xffffffffu, walk.done() && !passes)) release_query();
#pragma unroll 1
      for (; !walk.done(); walk.advance()) {
        multiply_query_key();
        if (__any_sync(0xffffffffu, walk.at_last() && !passes)) release_query();
        if (walk.ordinal() > 0) wait_weights(other);
        softmax(walk.block(), walk.ordinal());
        if (walk.ordinal() > 0) add_weighted_values(walk.previous(), other, !passes);
        wait_weights(consumer_);
        add_weighted_values(walk.block(), consumer_, !passes);
      }
      if (walk.other_has_last()) {
        wait_weights(other);
#pragma unroll
        for (int half = 0; half < 2; ++half) sum_[half] *= shared_.factor[other][row_ + 8 * half];
        add_weighted_values(walk.previous(), other, !passes);
      }
      sum_rows<Tile>(shared_, consumer_, row_, sum_);
      const float* s_reference = shared_.reference[walk.other_has_last() ? other : consumer_];
      if constexpr (Tile::kSplits) {
        leave_piece<Tile>(p_, order.pieces, work_, s_reference, consumer_, row_, col_, sum_, out_);
      } else {
        finish(s_reference, passes);
      }
    }
  }

 private:
  // The rows' log-sum-exp and output, once out_ and the sums are complete.
  __device__ __forceinline__ void finish(const float* s_reference, bool passes) {
    if (consumer_ == 0 && work_.first_column == 0) {
      const float scale = kGeneral ? 1.0f : static_cast<float>(p_.scale);
      store_lse(p_, work_, s_reference, scale, row_, sum_);
    }
    // Through the place of the weights, which are multiplied, or of the query in passes, which want the weights again.
    const T* s_tile = passes ? shared_.query[consumer_] : shared_.weights[consumer_][0];
    const uint32_t s_strip = shared_address(s_tile) + weights_offset<Tile>(row_ - threadIdx.x % 32 / 4, 0);
#pragma unroll 1
    for (int column = work_.first_column;; add_pass()) {  // one place of store_out: its code is long
      store_out<Tile>(p_, work_, s_strip, row_, sum_, out_, column + consumer_ * Tile::kValueSteps * Tile::kStep);
      column += Tile::kShareColumns;
      if (!passes || column >= p_.Ev) break;
    }
    if (passes) end_passes();
  }
  // out_ of the next columns of values, with the weights of the two blocks there may be.
  __device__ __forceinline__ void add_pass() {
    if constexpr (Tile::kPasses) {
#pragma unroll
      for (int i = 0; i < kOut; ++i) out_[i] = 0.0f;
#pragma unroll 1
      for (int owner = 0; owner < Tile::kConsumers; ++owner) {
        const BlockWalk<Tile, kGeneral> walk(work_, shared_.visible, owner);
        if (!__any_sync(0xffffffffu, walk.done())) add_weighted_values(walk.block(), owner, false);
      }
    }
  }
  // After all of them the weights are released, and the query, whose place the passes' results went through.
  __device__ __forceinline__ void end_passes() {
#pragma unroll 1
    for (int owner = 0; owner < Tile::kConsumers; ++owner) {
      if (!BlockWalk<Tile, kGeneral>(work_, shared_.visible, owner).done()) release_weights(owner);
    }
    fence_async_proxy();
    __syncwarp();  // the warp's results have left the query's place
    release_query();
  }

  static constexpr int kOut = 32 * Tile::kValueSteps;  // accumulators of O
  static constexpr int kScores = Tile::kN / 2;

  // Until the weights of `owner`'s next block that this warpgroup has not multiplied are in shared memory.
  __device__ __forceinline__ void wait_weights(int owner) const {
    mbarrier_wait(shared_address(&shared_.weights_ready[owner]), weights_parity_ >> owner & 1);
  }
  __device__ __forceinline__ uint32_t slot_address() const { return shared_address(shared_.ring[consumer_][place_.slot]); }
  __device__ __forceinline__ void wait_full() const {
    mbarrier_wait(shared_address(&shared_.full[consumer_][place_.slot]), place_.parity);
  }
  __device__ __forceinline__ void release(int slot) const {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&shared_.empty[consumer_][slot]));
  }

  __device__ __forceinline__ void release_query() const {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&shared_.query_empty));
  }

  __device__ __forceinline__ void begin_tile(const FusedOrder& order, uint32_t tile) {
    barrier_sync(kBarrierOwn + consumer_, 128);  // all of the warpgroup have left the tile before
    if (threadIdx.x % 128 == 0) work_.template init<Tile, kGeneral>(p_, order, tile);
    barrier_sync(kBarrierOwn + consumer_, 128);  // the work is written
#pragma unroll
    for (int i = 0; i < kOut; ++i) out_[i] = 0.0f;
    sum_[0] = sum_[1] = 0.0f;
    if constexpr (kGeneral) {
      if (consumer_ == 0 && threadIdx.x % 4 == 0) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          shared_.mask_row[row_ + 8 * half] = work_.offset_of_row(p_.batch, p_.mask, row_ + 8 * half);
        }
      }
      barrier_sync(kBarrierConsumers, 128 * Tile::kConsumers);  // both warpgroups have the rows
    }
  }

  // scores_ = Q K^T of the next block in the ring.
  __device__ __forceinline__ void multiply_query_key() {
    const int steps = (static_cast<int>(p_.E) + Tile::kStep - 1) / Tile::kStep;
    uint32_t s_query = shared_address(shared_.query[0]);
    int previous = 0;
    for (int step = 0; step < steps; ++step) {
      wait_full();
      wgmma_fence();
      const uint64_t query = matrix_descriptor(s_query, 1024, 0), key = matrix_descriptor(slot_address(), 1024, 0);
#pragma unroll
      for (int k = 0; k < Tile::kStep; k += 16) {
        wgmma<T, false>(scores_, query + k * sizeof(T) / 16, key + k * sizeof(T) / 16, step == 0 && k == 0);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (step > 0) release(previous);
      previous = place_.slot;
      place_.advance();
      s_query += Tile::kM * Tile::kStep * sizeof(T);
    }
    wgmma_wait<0>();
    pin_registers(scores_);
    release(previous);
  }

  // scores_ -> weights of this block in shared memory, with the rows' reference and the factor that takes O to it.
  // Without a mask, scores and references stay unscaled: the scale goes into the exponent's unit.
  __device__ __forceinline__ void softmax(int block, int ordinal) {
    const int first_key = block * Tile::kN + col_;
    const float scale = static_cast<float>(p_.scale), unit = kGeneral ? kLog2E : scale * kLog2E;
    if constexpr (kGeneral) {
      const auto mask_row = [&](int half) { return shared_.mask_row[row_ + 8 * half]; };
      // Scaled first: a factor that waits for the mask's elements would take a register, and there is none.
#pragma unroll
      for (float& score : scores_) score = __fmul_rn(score, scale);
      scale_and_mask<T>(scores_, 1.0f, p_.mask, p_.mask_type, mask_row, first_key, work_.keys);
    }
    const KeyRange range = work_.range(p_.sequence);
    if (block * Tile::kN + Tile::kN > work_.open_keys) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        hide_keys(scores_, half, first_key, range.end_of_row(work_.query_of(row_ + 8 * half)));
      }
    }
    RowReference rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_ + 8 * half;
      RowReference before = no_reference();
      if (ordinal > 0) before = {shared_.reference[1 - consumer_][row], shared_.factor[1 - consumer_][row]};
      rows[half] = make_weights(scores_, half, unit, before, sum_[half]);
    }

    // The other warpgroup has multiplied the weights before these; this one has too.
    mbarrier_wait(shared_address(&shared_.weights_free[consumer_]), (weights_parity_ >> consumer_ & 1) ^ 1);
    const uint32_t s_weights = shared_address(shared_.weights[consumer_]);
    store_weights<Tile>(scores_, s_weights, row_);
    if constexpr (kGeneral) {
      __syncwarp();  // the warp's weights are there
      if (p_.dropout.seed != nullptr) drop_weights<Tile>(p_.dropout, work_, block, s_weights, row_);
    }
    fence_async_proxy();
    __syncwarp();  // the warp's weights are there
    if (threadIdx.x % 4 == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        shared_.reference[consumer_][row_ + 8 * half] = rows[half].reference;
        shared_.factor[consumer_][row_ + 8 * half] = rows[half].factor;
      }
      mbarrier_arrive(shared_address(&shared_.weights_ready[consumer_]));
    }
  }

  // out_ = factor * out_ + P V of a block whose weights are ready, with the values next in the ring. `last`: with these weights.
  __device__ __forceinline__ void add_weighted_values(int block, int owner, bool last) {
    const float factor[2] = {shared_.factor[owner][row_], shared_.factor[owner][row_ + 8]};
    // Not left out where all factors are 1: a branch around the accumulators makes ptxas wait for every product on its own.
#pragma unroll
    for (int i = 0; i < kOut; ++i) out_[i] *= factor[i / 2 % 2];
    const uint32_t s_weights = shared_address(shared_.weights[owner]);
    const int slots = work_.value_slots(block, Tile::kValueKeys);
    int previous = 0;
    const auto multiply_slot = [&](int slot) {
      wait_full();
      wgmma_fence();
      const uint64_t weights = matrix_descriptor(
          s_weights + weights_offset<Tile>(0, slot * Tile::kValueKeys * static_cast<int>(sizeof(T)) / 16), 1024, 0);
      const uint64_t value = matrix_descriptor(slot_address(), 1024, Tile::kValueKeys * Tile::kStep * sizeof(T));
#pragma unroll
      for (int k = 0; k < Tile::kValueKeys; k += 16) {
        const uint32_t k_offset = k / Tile::kStep * (Tile::kM * Tile::kStep * sizeof(T)) + k % Tile::kStep * sizeof(T);
        wgmma<T, true>(out_, weights + k_offset / 16, value + k * Tile::kStep * sizeof(T) / 16);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (slot > 0) release(previous);
      previous = place_.slot;
      place_.advance();
    };
    if constexpr (kGeneral) {
      // Values from the batch row's last key on are not to be read, whatever memory holds there: a weight of 0 would not hide NaN.
      const int seen = work_.keys - block * Tile::kN;
      const int whole = p_.sequence.key_lengths != nullptr ? min(seen / Tile::kValueKeys, slots) : slots;
      for (int slot = 0; slot < whole; ++slot) multiply_slot(slot);
      if (whole < slots) {
        wait_full();
        clear_rows(slot_address(), Tile::kValueSteps, Tile::kValueKeys, seen - whole * Tile::kValueKeys,
                   kBarrierOwn + consumer_);
        multiply_slot(whole);
      }
    } else {
      for (int slot = 0; slot < slots; ++slot) multiply_slot(slot);
    }
    wgmma_wait<0>();
    pin_registers(out_);
    release(previous);
    if (last) release_weights(owner);
  }
  __device__ __forceinline__ void release_weights(int owner) {
    weights_parity_ ^= 1 << owner;
    if (owner != consumer_) mbarrier_arrive(shared_address(&shared_.weights_free[owner]));
  }

  const ForwardParams& p_;
  typename Tile::Shared& shared_;
  FusedWork& work_;  // this warpgroup's copy
  const int consumer_;
  RingPlace<Tile::kSlots> place_;
  uint32_t weights_parity_ = 0;  // bit w: of warpgroup w's next block that this one has not multiplied
  int row_, col_;                // of this thread's first element in a 64 x n product; the other row is 8 below
  float out_[kOut], scores_[kScores];
  float sum_[2];  // of this thread's own weights, relative to the reference
};

}  // namespace attention_ext
