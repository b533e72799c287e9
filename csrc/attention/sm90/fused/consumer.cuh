// The multiplying side of the fused forward: what one consumer warpgroup does with its blocks of keys and its half of Ev.
#pragma once

#include "attention/params.h"
#include "attention/sm90/fused/work.cuh"
#include "device/common/batch.cuh"
#include "device/common/math.cuh"
#include "device/common/random.cuh"
#include "device/common/types.cuh"
#include "device/sm80/cp_async.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/warpgroup.cuh"
#include "device/sm90/wgmma.cuh"
#include "gemm/sm90/strip.cuh"

namespace attention_ext {

// Barriers of bar.sync; 0 is __syncthreads.
enum FusedBarrier {
  kBarrierConsumers = 1,  // both consumer warpgroups
  kBarrierMarked = 2,     // all warps: the visible blocks are marked
  kBarrierOwn = 3,        // and 4: one consumer warpgroup
};

// One consumer warpgroup. kGeneral: there is a mask or dropout, or a scale that is not positive.
template <class Tile, bool kGeneral>
class FusedConsumer {
 public:
  using T = typename Tile::T;

  __device__ __forceinline__ FusedConsumer(const ForwardParams& p, typename Tile::Shared& shared, int consumer)
      : p_(p), shared_(shared), work_(shared.work[consumer]), consumer_(consumer) {
    row_ = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    col_ = threadIdx.x % 4 * 2;
  }

  __device__ __forceinline__ void run(uint32_t tiles, int columns) {
    if constexpr (kGeneral) barrier_sync(kBarrierMarked, Tile::kThreads);
    uint32_t query_parity = 0;
    const bool passes = Tile::kPasses && columns > Tile::kShareColumns;
#pragma unroll 1
    for (uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      begin_tile(tile, columns);
      mbarrier_wait(shared_address(&shared_.query_full), query_parity);
      query_parity ^= 1;
      const int other = 1 - consumer_;
      BlockWalk<kGeneral> walk(work_, shared_.visible, consumer_);
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
      finish_sums(walk.other_has_last() ? other : consumer_);
#pragma unroll 1
      for (int column = work_.first_column;; add_pass()) {  // one place of store_out: its code is long
        store_out(column, passes);
        column += Tile::kShareColumns;
        if (!passes || column >= p_.Ev) break;
      }
      if (passes) end_passes();
    }
  }

 private:
  // out_ of the next columns of values, with the weights of the two blocks there may be.
  __device__ __forceinline__ void add_pass() {
    if constexpr (Tile::kPasses) {
#pragma unroll
      for (int i = 0; i < kOut; ++i) out_[i] = 0.0f;
#pragma unroll 1
      for (int owner = 0; owner < Tile::kConsumers; ++owner) {
        const BlockWalk<kGeneral> walk(work_, shared_.visible, owner);
        if (!__any_sync(0xffffffffu, walk.done())) add_weighted_values(walk.block(), owner, false);
      }
    }
  }
  // Behind all of them the weights are released, and the query, whose place the passes' results went through.
  __device__ __forceinline__ void end_passes() {
#pragma unroll 1
    for (int owner = 0; owner < Tile::kConsumers; ++owner) {
      if (!BlockWalk<kGeneral>(work_, shared_.visible, owner).done()) release_weights(owner);
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

  __device__ __forceinline__ void begin_tile(uint32_t tile, int columns) {
    barrier_sync(kBarrierOwn + consumer_, 128);  // all of the warpgroup have left the tile before
    if (threadIdx.x % 128 == 0) work_.init(p_, tile, columns);
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
#pragma unroll
      for (int i = 0; i < kScores; ++i) scores_[i] *= scale;
      add_mask(first_key);
    }
    if (block * Tile::kN + Tile::kN > work_.open_keys) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int last_key = p_.causal ? min(work_.query_of(row_ + 8 * half), work_.keys - 1) : work_.keys - 1;
#pragma unroll
        for (int i = 2 * half; i < kScores; i += 4) {
          if (first_key + i / 4 * 8 > last_key) scores_[i] = negative_infinity(0.0f);
          if (first_key + i / 4 * 8 + 1 > last_key) scores_[i + 1] = negative_infinity(0.0f);
        }
      }
    }

    float factor[2], reference[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float max = negative_infinity(0.0f);
#pragma unroll
      for (int i = 0; i < kScores; i += 4) max = maximum(max, maximum(scores_[i + 2 * half], scores_[i + 2 * half + 1]));
      max = maximum(max, __shfl_xor_sync(0xffffffffu, max, 1));
      max = maximum(max, __shfl_xor_sync(0xffffffffu, max, 2));
      const int row = row_ + 8 * half;
      float before = negative_infinity(0.0f), factor_before = 1.0f;
      if (ordinal > 0) {
        before = shared_.reference[1 - consumer_][row];
        factor_before = shared_.factor[1 - consumer_][row];
      }
      reference[half] = maximum(max, before);  // -inf where no key was visible so far; NaN is left to the weights
      const float subtract = reference[half] == negative_infinity(0.0f) ? 0.0f : reference[half];
      factor[half] = before == reference[half] ? 1.0f : exp2_difference(before, subtract, unit);

      float sum = 0.0f;
#pragma unroll
      for (int i = 2 * half; i < kScores; i += 4) {
        scores_[i] = exp2_difference(scores_[i], subtract, unit);
        scores_[i + 1] = exp2_difference(scores_[i + 1], subtract, unit);
        sum += scores_[i] + scores_[i + 1];
      }
      sum_[half] = sum_[half] * (factor_before * factor[half]) + sum;
    }

    // The other warpgroup has multiplied the weights before these; this one has too.
    mbarrier_wait(shared_address(&shared_.weights_free[consumer_]), (weights_parity_ >> consumer_ & 1) ^ 1);
    const int lane = threadIdx.x % 32;
    const uint32_t s_weights = shared_address(shared_.weights[consumer_]);
    const uint32_t row = row_ - lane / 4 + lane % 16;  // matrices 0 and 2: the warp's first eight rows; 1 and 3: the others
#pragma unroll
    for (int tile = 0; tile < kScores / 4; tile += 2) {
      uint32_t m[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) m[i] = pack_pair<T>(scores_[tile * 4 + 2 * i], scores_[tile * 4 + 2 * i + 1]);
      store_matrices(s_weights + weights_offset(row, tile + lane / 16), m[0], m[1], m[2], m[3]);
    }
    if constexpr (kGeneral) {
      __syncwarp();  // the warp's weights are there
      if (p_.dropout.seed != nullptr) drop(block, s_weights);
    }
    fence_async_proxy();
    __syncwarp();  // the warp's weights are there
    if (lane % 4 == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        shared_.reference[consumer_][row_ + 8 * half] = reference[half];
        shared_.factor[consumer_][row_ + 8 * half] = factor[half];
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
    for (int slot = 0; slot < slots; ++slot) {
      wait_full();
      wgmma_fence();
      const uint64_t weights =
          matrix_descriptor(s_weights + weights_offset(0, slot * Tile::kValueKeys * static_cast<int>(sizeof(T)) / 16), 1024, 0);
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

  __device__ __forceinline__ void add_mask(int first_key) {
    switch (p_.mask_type) {
      case MaskType::kNone: break;
      case MaskType::kBool: add_mask_of<uint8_t>(first_key); break;
      case MaskType::kSameAsQuery: add_mask_of<T>(first_key); break;
      case MaskType::kFloat: add_mask_of<float>(first_key); break;
    }
  }
  template <class Stored>
  __device__ __forceinline__ void add_mask_of(int first_key) {
    const Stored* g_mask = static_cast<const Stored*>(p_.mask.data);
    g_mask += first_key * p_.mask.col_stride;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Stored* g_key = g_mask + shared_.mask_row[row_ + 8 * half];
#pragma unroll
      for (int i = 2 * half; i < kScores; i += 4) {
        if (i % 16 < 4) keep_order();  // eight loads in flight; the compiler would take registers for all
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (first_key + i / 4 * 8 + e >= p_.S) continue;
          const Stored stored = g_key[e * p_.mask.col_stride];
          if constexpr (std::is_same_v<Stored, uint8_t>) {
            if (stored == 0) scores_[i + e] = negative_infinity(0.0f);
          } else {
            scores_[i + e] += to_accumulator(stored);
          }
        }
        g_key = step_pointer(g_key, 8 * p_.mask.col_stride);
      }
    }
  }

  // Dropout of the weights in shared memory, quad by quad of keys, this warp's own 16 rows.
  __device__ __forceinline__ void drop(int block, uint32_t s_weights) {
    const int64_t seed = *p_.dropout.seed;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int i = lane; i < 16 * Tile::kN / 4; i += 32) {
      const int row = row_ - lane / 4 + i / (Tile::kN / 4), key = i % (Tile::kN / 4) * 4;
      const uint32_t s_quad = s_weights + weights_offset(row, key / 8) + key % 8 * sizeof(T);
      Quad<T>& stored = *static_cast<Quad<T>*>(const_cast<void*>(shared_pointer(s_quad)));
      float weights[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) weights[e] = to_accumulator(stored.value[e]);
      drop_quad(weights, p_.dropout, seed, work_.head_of(row), work_.query_of(row), block * Tile::kN + key);
      store_whole_quad(stored.value, weights);
    }
  }

  // Byte offset of 16-byte chunk `chunk` of a row of weights: tiles of 64 keys.
  static __device__ __forceinline__ uint32_t weights_offset(uint32_t row, uint32_t chunk) {
    return chunk / 8 * (Tile::kM * Tile::kStep * sizeof(T)) + swizzled(row, chunk % 8);
  }

  // sum_ of all weights of the rows; the log-sum-exp to memory.
  // The last owner's references are read behind the last barrier: warpgroup 1 writes its own anew only after warpgroup 0 has made the
  // first weights of the next tile, and so has left this one.
  __device__ __forceinline__ void finish_sums(int last_owner) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum_[half] += __shfl_xor_sync(0xffffffffu, sum_[half], 1);
      sum_[half] += __shfl_xor_sync(0xffffffffu, sum_[half], 2);
      if (threadIdx.x % 4 == 0) shared_.sum[consumer_][row_ + 8 * half] = sum_[half];
    }
    barrier_sync(kBarrierConsumers, 128 * Tile::kConsumers);
#pragma unroll
    for (int half = 0; half < 2; ++half) sum_[half] = shared_.sum[0][row_ + 8 * half] + shared_.sum[1][row_ + 8 * half];
    barrier_sync(kBarrierConsumers, 128 * Tile::kConsumers);  // the sums are read, the next tile may write
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_ + 8 * half;
      if (consumer_ == 0 && work_.first_column == 0 && threadIdx.x % 4 == 0 && row < work_.rows) {
        static_cast<float*>(p_.lse.data)[work_.offset_of_row(p_.batch, p_.lse, row)] =
            sum_[half] == 0.0f ? negative_infinity(0.0f)
                               : shared_.reference[last_owner][row] * (kGeneral ? 1.0f : static_cast<float>(p_.scale)) +
                                     natural_log(sum_[half]);
      }
    }
  }

  // out_ / sum to memory, columns from `first_column` on, through this warp's own rows of a tile in shared memory: the weights', which are
  // multiplied, or the query's in passes, which want the weights again.
  __device__ __forceinline__ void store_out(int first_column, bool passes) {
    float row_factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float keep_scale = p_.dropout.seed != nullptr ? static_cast<float>(p_.dropout.keep_scale) : 1.0f;
      row_factor[half] = sum_[half] == 0.0f ? 0.0f : keep_scale / sum_[half];
    }
    const int lane = threadIdx.x % 32, warp_row = row_ - lane / 4;
    const int first_col = first_column + consumer_ * Tile::kValueSteps * Tile::kStep;
    const int64_t found = work_.offset_of_row(p_.batch, p_.out, warp_row + lane % 16);  // every lane finds a row's place
    const T* s_tile = passes ? shared_.query[consumer_] : shared_.weights[consumer_][0];
    const uint32_t s_strip = shared_address(s_tile) + weights_offset(warp_row, 0);
#pragma unroll
    for (int strip = 0; strip < Tile::kValueSteps; ++strip) {
      float values[Tile::kStep / 2];
#pragma unroll
      for (int i = 0; i < Tile::kStep / 2; ++i) values[i] = scaled(out_[strip * (Tile::kStep / 2) + i], row_factor[i / 2 % 2]);
      for_each_chunk<T, 1>(values, s_strip, [&](int chunk_row, int chunk_col, const T* chunk) {
        T* g_row = static_cast<T*>(p_.out.data) + __shfl_sync(0xffffffffu, found, chunk_row);
        const int col = first_col + strip * Tile::kStep + chunk_col, cols = static_cast<int>(p_.Ev);
        if (warp_row + chunk_row < work_.rows && col < cols) store_chunk(g_row, col, cols, p_.out, chunk);
      });
    }
  }
  static __device__ __forceinline__ float scaled(float x, float factor) { return factor == 0.0f ? 0.0f : x * factor; }

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
