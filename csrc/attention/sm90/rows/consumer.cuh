// The multiplying side of the row kernels: what one consumer warpgroup does with its 64 rows.
#pragma once

#include "attention/params.h"
#include "attention/sm90/rows/bias.cuh"
#include "attention/sm90/rows/tile.cuh"
#include "attention/softmax/online_softmax.cuh"
#include "attention/visibility/dropout.cuh"
#include "attention/visibility/score_modifier.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/warpgroup.cuh"
#include "device/sm90/wgmma.cuh"
#include "gemm/sm90/clear_rows.cuh"
#include "gemm/sm90/strip.cuh"

namespace attention_ext {

// One consumer warpgroup.
template <class Tile, RowsKind kKind>
class RowsConsumer {
 public:
  using T = typename Tile::T;

  __device__ __forceinline__ RowsConsumer(const ForwardParams& p, typename Tile::Shared& shared, int consumer)
      : p_(p), shared_(shared), consumer_(consumer) {
    row_ = consumer * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    col_ = threadIdx.x % 4 * 2;
  }

  __device__ __forceinline__ void run(const RowsOrder& order) {
    if (Tile::kTurns && consumer_ == Tile::kConsumers - 1) pass_turn();  // warpgroup 0 has the first
    RowsPlaces places(order.tiles);
#pragma unroll 1
    while (places.next()) {
      query_ = places.template query<Tile::kQueries>();
      mbarrier_wait(shared_address(&shared_.query_full[query_]), places.template parity<Tile::kQueries>());
      work_ = &shared_.work[places.round() % Tile::kWorks];
      begin_tile();
      block_ = work_->end;
      find_block();
      const bool any = kKind == kPlain || block_ >= 0;
      if (any) {
        begin_scores();
        // From the last block on; the first ones may have keys that not every row sees.
        const int open = end_of_row(0), first = kKind == kPlain ? work_->first_block() : 0;
        if constexpr (kKind == kGeneral) {
#pragma unroll 1
          while (block_ >= first) step<true>();
        } else {
#pragma unroll 1
          while (block_ >= first && (block_ + 1) * Tile::kN > open) step<true>();
#pragma unroll 1
          while (block_ >= first) step<false>();
        }
      }
      if constexpr (!kQueryStrips) release_query();
      if (any) {
        if constexpr (!Tile::kTurns) rescale();
        add_values();
        wgmma_wait<0>();
        pin_out();
        release(shared_.value_empty, value_place_);
      }
      if constexpr (Tile::kSplits) {
        leave(order.pieces);
      } else {
        finish();
      }
      if constexpr (kQueryStrips) {
        fence_async_proxy();
        __syncwarp();  // the warp's results have left the query's place
        release_query();
      }
    }
  }

 private:
  static constexpr int kScores = Tile::kN / 2;
  static constexpr int kSlices = Tile::kN / 16;  // of a block, each the k of one product with the values
  static constexpr int kPartSteps = Tile::kValueSteps % 2 == 1 ? 1 : 2,
                       kParts = Tile::kValueSteps / kPartSteps;  // of O, by instruction
  static constexpr int kTurnThreads = 256;
  static constexpr bool kQueryStrips = Tile::query_strips(kKind), kBiasRing = Tile::bias_ring(kKind);

  __device__ __forceinline__ void take_turn() const { barrier_sync(kBarrierTurn + consumer_, kTurnThreads); }
  __device__ __forceinline__ void pass_turn() const {
    barrier_arrive(kBarrierTurn + (consumer_ + 1 == Tile::kConsumers ? 0 : consumer_ + 1), kTurnThreads);
  }
  __device__ __forceinline__ int warp_row() const { return row_ - threadIdx.x % 32 / 4; }  // the warp's first
  __device__ __forceinline__ int end_of_row(int row) const { return work_->end_of_row(p_.sequence, consumer_ * 64 + row); }

  __device__ __forceinline__ void wait(const uint64_t* full, const RingPlace<Tile::kStages>& place) const {
    mbarrier_wait(shared_address(&full[place.slot]), place.parity);
  }
  __device__ __forceinline__ void release(uint64_t* empty, RingPlace<Tile::kStages>& place) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&empty[place.slot]));
    place.advance();
  }
  __device__ __forceinline__ void release_query() const {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&shared_.query_empty[query_]));
  }
  __device__ __forceinline__ void pin_out() {
#pragma unroll
    for (int part = 0; part < kParts; ++part) pin_registers(out_[part]);
  }

  __device__ __forceinline__ void begin_tile() {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < 32 * kPartSteps; ++i) out_[part][i] = 0.0f;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows_[half] = no_reference();
      sum_[half] = 0.0f;
      if constexpr (kKind != kPlain && !kBiasRing) {
        // All four lanes of a row: a condition would take a register for the tile.
        shared_.mask_row[row_ + 8 * half] = work_->offset_of_row(p_.batch, p_.mask, work_->mask, row_ + 8 * half);
      }
    }
    if constexpr (kKind != kPlain && !kBiasRing) __syncwarp();  // the warp's rows of the mask are written
    if constexpr (kKind == kBias) bias_.begin_tile(p_, shared_, *work_, warp_row());
  }

  // block_ -> the block that the next stage of keys holds; -1 after the tile's last one, but plain. A bias that waits in registers
  // sets out at once, to come while the values of the block before it and its scores are multiplied.
  __device__ __forceinline__ void find_block() {
    if constexpr (kKind == kPlain) {
      --block_;
    } else {
      wait(shared_.key_full, key_place_);
      int block = 0;
      if (threadIdx.x % 32 == 0) block = shared_.block[key_place_.slot];  // the lane that releases the stage
      block = __shfl_sync(0xffffffffu, block, 0);
      if (block < 0) release(shared_.key_empty, key_place_);
      unmasked_ = block & 1;
      block_ = block >> 1;
      if constexpr (kKind == kBias) bias_.request(p_, shared_, warp_row(), block_);
    }
  }

  // scores_ = Q K^T of the keys next in the ring, begun.
  __device__ __forceinline__ void multiply_keys() {
    const uint32_t s_query = shared_address(shared_.query[query_][0]) + consumer_ * 64 * 128;
    const uint64_t query = matrix_descriptor(s_query, 1024, 0);
    const uint64_t key = matrix_descriptor(shared_address(shared_.key[key_place_.slot][0]), 1024, 0);
#pragma unroll
    for (int k = 0; k < 4 * Tile::kQuerySteps; ++k) {
      wgmma<T, false>(scores_, query + (k / 4 * (Tile::kM * 128) + k % 4 * 32) / 16,
                      key + (k / 4 * (Tile::kN * 128) + k % 4 * 32) / 16, k == 0);
    }
    wgmma_commit();
  }

  // out_ += P V of the values next in the ring, begun; waits for them.
  __device__ __forceinline__ void add_values() {
    wait(shared_.value_full, value_place_);
    wgmma_fence();
    const uint32_t s_value = shared_address(shared_.value[value_place_.slot][0]);
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const uint64_t value = matrix_descriptor(s_value + part * kPartSteps * Tile::kN * 128, 1024, Tile::kN * 128);
        wgmma_from_registers<T>(out_[part], weights_[slice], value + slice * 2048 / 16);
      }
    }
    wgmma_commit();
  }

  // Scores and weights of the tile's first block; there are no weights before it.
  __device__ __forceinline__ void begin_scores() {
    if constexpr (kKind == kPlain) wait(shared_.key_full, key_place_);
    wgmma_fence();
    multiply_keys();
    if constexpr (kKind == kBias) bias_.receive(shared_);
    wgmma_wait<0>();
    pin_registers(scores_);
    release(shared_.key_empty, key_place_);
    const int block = block_;
    softmax<true>(block);
    find_block();
    pack_weights(block);
    if constexpr (kKind != kPlain) {
      // Values from the batch row's last key on are not to be read, whatever memory holds there: a weight of 0 would not hide NaN.
      const int seen = work_->keys - block * Tile::kN;
      if (p_.sequence.key_lengths != nullptr && seen < Tile::kN) {
        wait(shared_.value_full, value_place_);
        clear_rows(shared_address(shared_.value[value_place_.slot][0]), Tile::kValueSteps, Tile::kN, seen,
                   kBarrierRowsOwn + consumer_);
      }
    }
  }

  // The scores of a block, while the values of the block before it are multiplied.
  template <bool kMasked>
  __device__ __forceinline__ void step() {
    if constexpr (kKind == kPlain) wait(shared_.key_full, key_place_);
    if constexpr (Tile::kTurns) take_turn();
    wgmma_fence();
    multiply_keys();
    if constexpr (!Tile::kTurns) rescale();  // while the scores are computed
    add_values();
    if constexpr (Tile::kTurns) pass_turn();
    if constexpr (kKind == kBias) bias_.receive(shared_);
    wgmma_wait<1>();
    pin_registers(scores_);
    release(shared_.key_empty, key_place_);
    const int block = block_;
    softmax<kMasked>(block);
    find_block();
    wgmma_wait<0>();
    pin_out();
    release(shared_.value_empty, value_place_);
    if constexpr (Tile::kTurns) rescale();
    pack_weights(block);
  }

  // scores_ -> weights, with the rows' reference and the factor that takes out_ to it. Without a mask, scores and references stay
  // unscaled: the scale goes into the exponent's unit.
  template <bool kMasked>
  __device__ __forceinline__ void softmax(int block) {
    const int first_key = block * Tile::kN + col_;
    const float scale = static_cast<float>(p_.scale), unit = kKind == kPlain ? scale * kLog2E : kLog2E;
    if constexpr (kKind == kBias) {
      bias_.add_to(scores_, scale);
    } else if constexpr (kKind == kGeneral) {
      const MaskType type = unmasked_ ? MaskType::kNone : p_.mask_type;
      const auto mask_row = [&](int half) { return shared_.mask_row[row_ + 8 * half]; };
      scale_and_mask<T>(scores_, scale, p_.mask, type, mask_row, first_key, work_->keys);
    }
    if constexpr (kMasked) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        hide_keys(scores_, half, first_key, work_->end_of_row(p_.sequence, row_ + 8 * half));
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows_[half] = make_weights(scores_, half, unit, {rows_[half].reference, 1.0f}, sum_[half]);
    }
  }

  __device__ __forceinline__ void rescale() {
    // Not left out where all factors are 1: a branch around the accumulators makes ptxas wait for every product on its own.
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < 32 * kPartSteps; ++i) out_[part][i] *= rows_[i / 2 % 2].factor;
    }
  }

  // A result of wgmma and an operand of it in registers lie alike.
  __device__ __forceinline__ void pack_weights(int block) {
    if constexpr (kKind == kGeneral) {
      if (p_.dropout.seed != nullptr) {
        visit_kept_of_tile<kScores>(p_.dropout, *work_, row_, block * Tile::kN, [&](int i, bool kept) {
          if (!kept) scores_[i] = 0.0f;
        });
      }
    }
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) weights_[i / 4][i % 4] = pack_pair<T>(scores_[2 * i], scores_[2 * i + 1]);
  }

  // What a piece of the keys has summed, for combine_pieces.
  __device__ __forceinline__ void leave(const KeyPieces& pieces) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_ + 8 * half;
      const float sum = warp_sum<4>(sum_[half]);
      if (row >= work_->rows) continue;
      leave_row<8 * Tile::kValueSteps>(pieces, work_->left + row, rows_[half].reference, sum, 0, col_,
                                       [&](int i) { return &out_[i / (8 * kPartSteps)][i % (8 * kPartSteps) * 4 + 2 * half]; });
    }
  }

  // The rows' sums, log-sum-exp and output, once out_ is complete.
  __device__ __forceinline__ void finish() {
    const float scale = kKind == kPlain ? static_cast<float>(p_.scale) : 1.0f;
    float row_factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_ + 8 * half;
      const float sum = warp_sum<4>(sum_[half]);
      if (col_ == 0 && row < work_->rows) {
        // Rounded, as the compiler would otherwise fuse the product into the sum for one of the two rows and not for the other.
        static_cast<float*>(p_.lse.data)[work_->offset_of_row(p_.batch, p_.lse, work_->lse, row)] =
            log_sum_exp(__fmul_rn(rows_[half].reference, scale), sum);
      }
      const float keep_scale = p_.dropout.seed != nullptr ? static_cast<float>(p_.dropout.keep_scale) : 1.0f;
      row_factor[half] = sum == 0.0f ? 0.0f : keep_scale / sum;
    }
    const int lane = threadIdx.x % 32, first_row = warp_row();
    const int64_t found =
        work_->offset_of_row(p_.batch, p_.out, work_->out, first_row + lane % 16);  // every lane finds a row's place
    const uint32_t s_strip = kQueryStrips ? shared_address(shared_.query[query_][0]) + first_row * 128
                                          : shared_address(shared_.strip[threadIdx.x / 32]);
#pragma unroll
    for (int step = 0; step < Tile::kValueSteps; ++step) {
      float values[Tile::kStep / 2];
#pragma unroll
      for (int i = 0; i < Tile::kStep / 2; ++i) {
        const float factor = row_factor[i / 2 % 2];
        values[i] = factor == 0.0f ? 0.0f : out_[step / kPartSteps][step % kPartSteps * (Tile::kStep / 2) + i] * factor;
      }
      for_each_chunk<T, 4>(values, s_strip, [&](int chunk_row, int chunk_col, const T* chunk) {
        T* g_row = static_cast<T*>(p_.out.data) + __shfl_sync(0xffffffffu, found, chunk_row);
        const int col = step * Tile::kStep + chunk_col, cols = static_cast<int>(p_.Ev);
        if (first_row + chunk_row < work_->rows && col < cols) store_chunk(g_row, col, cols, p_.out, chunk);
      });
    }
  }

  const ForwardParams& p_;
  typename Tile::Shared& shared_;
  const RowsWork<Tile>* work_;  // of this tile
  const int consumer_;
  RingPlace<Tile::kStages> key_place_, value_place_;
  uint32_t query_;  // the place of this tile's
  int row_, col_;   // of this thread's first element in the tile's scores; the other row is 8 below
  int block_;       // of keys, next in the ring
  bool unmasked_;   // whether its scores are as they come
  RowsBias<Tile, kBiasRing> bias_;
  float out_[kParts][32 * kPartSteps], scores_[kScores];
  uint32_t weights_[kSlices][4];
  RowReference rows_[2];
  float sum_[2];  // of this thread's own weights, relative to the reference
};

}  // namespace attention_ext
