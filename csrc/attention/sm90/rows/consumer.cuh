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
      const bool few = kFewScores < kScores && work_->keys <= 2 * kFewScores;
      if (any) {
        if (few) {
          begin_scores<kFewScores>();
        } else {
          begin_scores<kScores>();
        }
        // From the last block on; the first ones may have keys that not every row sees.
        const int first = kKind == kPlain ? work_->first_block() : 0;
        if constexpr (kKind == kGeneral) {
#pragma unroll 1
          while (block_ >= first) step<true>();
        } else {
#pragma unroll 1
          while (block_ >= first && (block_ + 1) * Tile::kN > open_) step<true>();
          if (kFewSteps < Tile::kValueSteps && p_.Ev <= kFewSteps * Tile::kStep) {
#pragma unroll 1
            while (block_ >= first) step<false, kFewSteps>();
          } else {
#pragma unroll 1
            while (block_ >= first) step<false>();
          }
        }
      }
      // Results leave through the query's first columns; the others' place is free.
      release_query(kQueryStrips ? shared_.query_rest_empty : shared_.query_empty);
      if (any) {
        if constexpr (!Tile::kTurns) rescale();
        if (few) {
          add_values<kFewScores>();
        } else {
          add_values<kScores>();
        }
      }
      if constexpr (!Tile::kSplits) finish_rows();  // while they are multiplied
      if (any) {
        wgmma_wait<0>();
        pin_out();
        release(shared_.value_empty, value_place_);
      }
      if constexpr (Tile::kSplits) {
        leave(order.pieces);
      } else {
        store_out();
      }
      if constexpr (kQueryStrips) {
        fence_async_proxy();
        __syncwarp();  // the warp's results have left the query's place
        release_query(shared_.query_empty);
      }
    }
  }

 private:
  static constexpr int kScores = Tile::kN / 2;
  static constexpr int kSlices = Tile::kN / 16;  // of a block, each the k of one product with the values
  // Of a tile that sees no more than 80 keys, as of a prompt's 77 tokens. Not of masks' instances, whose code is long.
  static constexpr int kFewScores = kKind == kPlain && !Tile::kSplits && kScores > 40 ? 40 : kScores;
  static constexpr int kPartSteps = Tile::kValueSteps % 2 == 1 ? 1 : 2,
                       kParts = Tile::kValueSteps / kPartSteps;  // of O, by instruction
  // Where half of the columns of values or less count, as with values of 64 in class 128, blocks are multiplied with half of them;
  // a tile's first and last block are not.
  static constexpr int kFewSteps =
      kKind == kPlain && !Tile::kSplits && kPartSteps == 2 ? Tile::kValueSteps / 2 : Tile::kValueSteps;
  static constexpr int kTurnThreads = 256;
  static constexpr int kPasses = 4;  // over a strip of 16 rows, four rows each
  static constexpr bool kQueryStrips = Tile::query_strips(kKind), kBiasRing = Tile::bias_ring(kKind);

  __device__ __forceinline__ void take_turn() const { barrier_sync(kBarrierTurn + consumer_, kTurnThreads); }
  __device__ __forceinline__ void pass_turn() const {
    barrier_arrive(kBarrierTurn + (consumer_ + 1 == Tile::kConsumers ? 0 : consumer_ + 1), kTurnThreads);
  }
  __device__ __forceinline__ int warp_row() const { return row_ - threadIdx.x % 32 / 4; }  // the warp's first
  // What the end of a tile makes of it is not held in registers during the loop over blocks.
  __device__ __forceinline__ static int late_lane() { return forget(threadIdx.x % 32); }
  __device__ __forceinline__ static int row_of_pass(int pass, int lane) { return pass * 4 + lane / 8; }
  __device__ __forceinline__ int end_of_row(int row) const { return work_->end_of_row(p_.sequence, consumer_ * 64 + row); }

  __device__ __forceinline__ void wait(const uint64_t* full, const RingPlace<Tile::kStages>& place) const {
    mbarrier_wait(shared_address(&full[place.slot]), place.parity);
  }
  __device__ __forceinline__ void release(uint64_t* empty, RingPlace<Tile::kStages>& place) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&empty[place.slot]));
    place.advance();
  }
  __device__ __forceinline__ void release_query(uint64_t* empty) const {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&empty[query_]));
  }
  __device__ __forceinline__ void pin_out() {
#pragma unroll
    for (int part = 0; part < kParts; ++part) pin_registers(out_[part]);
  }

  __device__ __forceinline__ void begin_tile() {
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

  // The first scores of a block.
  template <int kCount>
  __device__ __forceinline__ float (&first_scores()) [kCount] { return reinterpret_cast<float (&)[kCount]>(scores_); }

  // scores_ = Q K^T of the keys next in the ring, begun; of the first 2 kCount of them.
  template <int kCount = kScores>
  __device__ __forceinline__ void multiply_keys() {
    const uint32_t s_query = shared_address(shared_.query[query_][0]) + consumer_ * 64 * 128;
    const uint64_t query = matrix_descriptor(s_query, 1024, 0);
    const uint64_t key = matrix_descriptor(shared_address(shared_.key[key_place_.slot][0]), 1024, 0);
#pragma unroll
    for (int k = 0; k < 4 * Tile::kQuerySteps; ++k) {
      wgmma<T, false>(first_scores<kCount>(), query + (k / 4 * (Tile::kM * 128) + k % 4 * 32) / 16,
                      key + (k / 4 * (Tile::kN * 128) + k % 4 * 32) / 16, k == 0);
    }
    wgmma_commit();
  }

  // out_ += P V of the values next in the ring, begun; waits for them. Of as many values as there are scores, and of so many steps
  // of their columns.
  template <int kCount = kScores, int kSteps = Tile::kValueSteps>
  __device__ __forceinline__ void add_values() {
    wait(shared_.value_full, value_place_);
    wgmma_fence();
    const uint32_t s_value = shared_address(shared_.value[value_place_.slot][0]);
#pragma unroll
    for (int slice = 0; slice < kCount / 8; ++slice) {
#pragma unroll
      for (int part = 0; part < ceil_div(kSteps, kPartSteps); ++part) {
        const uint64_t value = matrix_descriptor(s_value + part * kPartSteps * Tile::kN * 128, 1024, Tile::kN * 128);
        auto& columns = reinterpret_cast<float (&)[32 * std::min(kSteps, kPartSteps)]>(out_[part]);
        wgmma_from_registers<T>(columns, weights_[slice], value + slice * 2048 / 16);
      }
    }
    wgmma_commit();
  }

  // Scores and weights of the tile's first block; there are no weights before it. kCount: of its scores.
  template <int kCount>
  __device__ __forceinline__ void begin_scores() {
    if constexpr (kKind == kPlain) wait(shared_.key_full, key_place_);
    wgmma_fence();
    multiply_keys<kCount>();
    for_each_of_out([](float& x, int) { x = 0.0f; });
    open_ = end_of_row(0);
    if constexpr (kKind == kBias) bias_.receive(shared_);
    wgmma_wait<0>();
    pin_registers(first_scores<kCount>());
    release(shared_.key_empty, key_place_);
    const int block = block_;
    softmax<kCount>(block, block * Tile::kN + 2 * kCount > open_);
    find_block();
    pack_weights<kCount>(block);
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
  template <bool kMasked, int kSteps = Tile::kValueSteps>
  __device__ __forceinline__ void step() {
    if constexpr (kKind == kPlain) wait(shared_.key_full, key_place_);
    if constexpr (Tile::kTurns) take_turn();
    wgmma_fence();
    multiply_keys();
    if constexpr (!Tile::kTurns) rescale();  // while the scores are computed
    add_values<kScores, kSteps>();
    if constexpr (Tile::kTurns) pass_turn();
    if constexpr (kKind == kBias) bias_.receive(shared_);
    wgmma_wait<1>();
    pin_registers(scores_);
    release(shared_.key_empty, key_place_);
    const int block = block_;
    softmax(block, kMasked);
    find_block();
    wgmma_wait<0>();
    pin_out();
    release(shared_.value_empty, value_place_);
    if constexpr (Tile::kTurns) rescale();
    pack_weights(block);
  }

  // scores_ -> weights, with the rows' reference and the factor that takes out_ to it. Without a mask, scores and references stay
  // unscaled: the scale goes into the exponent's unit.
  template <int kCount = kScores>
  __device__ __forceinline__ void softmax(int block, bool hides) {
    float (&scores)[kCount] = first_scores<kCount>();
    const int first_key = block * Tile::kN + col_;
    const float scale = static_cast<float>(p_.scale), unit = kKind == kPlain ? scale * kLog2E : kLog2E;
    if constexpr (kKind == kBias) {
      bias_.add_to(scores, scale);
    } else if constexpr (kKind == kGeneral) {
      const MaskType type = unmasked_ ? MaskType::kNone : p_.mask_type;
      const auto mask_row = [&](int half) { return shared_.mask_row[row_ + 8 * half]; };
      scale_and_mask<T>(scores, scale, p_.mask, type, mask_row, first_key, work_->keys);
    }
    if (hides) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        hide_keys(scores, half, first_key, work_->end_of_row(p_.sequence, row_ + 8 * half));
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows_[half] = make_weights(scores, half, unit, {rows_[half].reference, 1.0f}, sum_[half]);
    }
  }

  __device__ __forceinline__ void rescale() {
    // Not left out where all factors are 1: a branch around the accumulators makes ptxas wait for every product on its own.
    for_each_of_out([&](float& x, int half) { x *= rows_[half].factor; });
  }

  // visit(element of out_, which of the thread's two rows it is of)
  template <class Visit>
  __device__ __forceinline__ void for_each_of_out(const Visit& visit) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < 32 * kPartSteps; ++i) visit(out_[part][i], i / 2 % 2);
    }
  }

  // A result of wgmma and an operand of it in registers lie alike.
  template <int kCount = kScores>
  __device__ __forceinline__ void pack_weights(int block) {
    if constexpr (kKind == kGeneral) {
      if (p_.dropout.seed != nullptr) {
        visit_kept_of_tile<kScores>(p_.dropout, *work_, row_, block * Tile::kN, [&](int i, bool kept) {
          if (!kept) scores_[i] = 0.0f;
        });
      }
    }
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) weights_[i / 4][i % 4] = pack_pair<T>(scores_[2 * i], scores_[2 * i + 1]);
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

  // The rows' log-sum-exp, what out_ is multiplied by, and where it goes.
  __device__ __forceinline__ void finish_rows() {
    const float scale = kKind == kPlain ? static_cast<float>(p_.scale) : 1.0f;
    const float keep_scale = p_.dropout.seed != nullptr ? static_cast<float>(p_.dropout.keep_scale) : 1.0f;
    const float sum[2] = {warp_sum<4>(sum_[0]), warp_sum<4>(sum_[1])};
#pragma unroll
    for (int half = 0; half < 2; ++half) out_factor_[half] = sum[half] == 0.0f ? 0.0f : quotient(keep_scale, sum[half]);
    const int lane = late_lane(), half = lane % 4, row = row_ + 8 * half;  // two of the rows' four lanes have one each
    if (half < 2 && row < work_->rows) {
      // Rounded, as the compiler could otherwise fuse the product into the sum.
      static_cast<float*>(p_.lse.data)[work_->offset_of_row(p_.batch, p_.lse, work_->lse, row)] =
          log_sum_exp(__fmul_rn(half == 0 ? rows_[0].reference : rows_[1].reference, scale), half == 0 ? sum[0] : sum[1]);
    }
    const int64_t found =
        work_->offset_of_row(p_.batch, p_.out, work_->out, warp_row() + lane % 16);  // a lane finds a row's place
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      place_[pass] = static_cast<T*>(p_.out.data) + __shfl_sync(0xffffffffu, found, row_of_pass(pass, lane));
    }
  }

  // The output, once out_ is complete: 16 rows and 64 columns of a warp at a time through its strip.
  __device__ __forceinline__ void store_out() {
    // A row that sees no key: its out_ may be NaN.
    if (__any_sync(0xffffffffu, out_factor_[0] == 0.0f || out_factor_[1] == 0.0f)) {
      for_each_of_out([&](float& x, int half) { x = out_factor_[half] == 0.0f ? 0.0f : x; });
    }
    for_each_of_out([&](float& x, int half) { x *= out_factor_[half]; });
    const uint32_t s_strip = kQueryStrips ? shared_address(shared_.query[query_][0]) + warp_row() * 128
                                          : shared_address(shared_.strip[threadIdx.x / 32]);
    const int rows = work_->rows - warp_row(), cols = static_cast<int>(p_.Ev), lane = late_lane();
    const auto chunk_of = [&](int pass) { return shared_pointer(s_strip + swizzled(row_of_pass(pass, lane), lane % 8)); };
    const bool whole = p_.out.vector && cols % 8 == 0;  // chunks of eight columns, that are written at once
#pragma unroll
    for (int step = 0; step < Tile::kValueSteps; ++step) {
      uint32_t pairs[16];
      pack_strip<T>(reinterpret_cast<const float (&)[32]>(out_[step / kPartSteps][step % kPartSteps * 32]), pairs);
      write_strip(pairs, s_strip, lane);
      const int col = step * Tile::kStep + lane % 8 * 8;
      if (whole) {
        uint4 chunk[kPasses];  // all are read before one is written, which the compiler would not do by itself
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) chunk[pass] = *static_cast<const uint4*>(chunk_of(pass));
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
          if (row_of_pass(pass, lane) < rows && col < cols) *reinterpret_cast<uint4*>(place_[pass] + col) = chunk[pass];
        }
      } else {
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
          if (row_of_pass(pass, lane) >= rows || col >= cols) continue;
          store_chunk(place_[pass], col, cols, p_.out, static_cast<const T*>(chunk_of(pass)));
        }
      }
      __syncwarp();  // the strip has been read
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
  int open_;        // keys that all of the warpgroup's rows see
  bool unmasked_;   // whether its scores are as they come
  RowsBias<Tile, kBiasRing> bias_;
  float out_[kParts][32 * kPartSteps], scores_[kScores];
  uint32_t weights_[kSlices][4];
  RowReference rows_[2];
  float sum_[2];         // of this thread's own weights, relative to the reference
  float out_factor_[2];  // at the end of a tile: of out_
  T* place_[kPasses];    // then: of the rows of the output that this lane writes
};

}  // namespace attention_ext
