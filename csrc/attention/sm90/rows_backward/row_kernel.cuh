// The row kernel of the backward: dQ = scale * dS K, where dS = P (dP - delta) and dP = dO V^T.
//
// A CTA takes 128 queries of a head, 64 for each of two consumer warpgroups, and walks over blocks of keys from the last one to the
// first. dS never leaves registers: a result of wgmma lies there as a left operand of it does. Of block j, after block j + 1:
//   S_j = Q K_j^T, dP_j = dO V_j^T, dQ += dS_{j+1} K_{j+1} begin | S_j is there: P_j | dP_j is there: dS_j | dQ is there: packed
// Above head dim 128 registers do not hold dS_{j+1} next to dP_j, and the ring is short, so dQ is made first:
//   dQ += dS_{j+1} K_{j+1}, S_j begin | dQ is there: K_{j+1} is free, dP_j begins | S_j is there: P_j | dP_j is there: dS_j, packed
// A third warpgroup loads: a thread keys and values, in one ring, and one queries with their gradients, a tile at a time, and what
// their exponents need (QueryRecord); two of its warps clear keys that no query sees (unseen_keys.cuh). CTAs stay and take tile
// after tile. Blocks that a mask hides from all of the tile's queries are left out (shown_blocks.cuh).
// Shared memory: RowGradTile::Shared. Registers: 240 a consumer thread (dQ, S and dP, dS: 32, 128, 32; 64, 96, 24; 96 or 128, 64).
#pragma once

#include "attention/sm90/rows_backward/row_producer.cuh"
#include "attention/sm90/rows_backward/unseen_keys.cuh"
#include "attention/visibility/dropout.cuh"
#include "attention/visibility/key_range.cuh"
#include "attention/visibility/score_modifier.cuh"
#include "gemm/sm90/clear_rows.cuh"

namespace attention_ext {

// One consumer warpgroup.
template <class Tile>
class RowGradConsumer {
 public:
  using T = typename Tile::T;

  __device__ __forceinline__ RowGradConsumer(const RowsBackwardParams& p, typename Tile::Shared& shared, int consumer)
      : p_(p), shared_(shared), exponents_{p}, turns_{consumer}, consumer_(consumer) {
    row_ = consumer * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  }

  __device__ __forceinline__ void run(const RowsBackwardOrder& order) {
    turns_.begin();
    RowsPlaces places(order.tiles);
#pragma unroll 1
    while (places.next()) {
      place_ = places.template query<Tile::kPlaces>();
      mbarrier_wait(shared_address(&shared_.query_full[place_]), places.template parity<Tile::kPlaces>());
      work_ = &shared_.work[places.round() % Tile::kWorks];
      begin_tile();
      int block = Tile::kGeneral ? next_block() : (work_->keys + Tile::kN - 1) / Tile::kN - 1;
      const bool any = block >= 0;
      if (any) {
        clear_hidden_keys(block);
        step<true>(block);
#pragma unroll 1
        while ((block = Tile::kGeneral ? next_block() : block - 1) >= 0) step<false>(block);
      }
      if constexpr (Tile::kOwnStrips) release_query();
      if (any) {
        wgmma_fence();
        add_keys();
        wgmma_wait<0>();
        pin_query_grad();
        release(shared_.key_empty[before()]);
      }
      if constexpr (Tile::kGeneral) pass_end();
      const int warp_row = consumer_ * 64 + threadIdx.x / 32 % 4 * 16, rows = static_cast<int>(p_.L) - work_->row - warp_row;
      const uint32_t s_strip = Tile::kOwnStrips ? shared_address(shared_.strip[threadIdx.x / 32])
                                                : shared_address(shared_.query[place_][0]) + warp_row * 128;
      store_grad<T>(query_grad_, p_.scale_factor, p_.grad_query, work_->query_grad + warp_row * p_.grad_query.row_stride, rows,
                    rows, static_cast<int>(p_.E), p_.wide_grads, s_strip);
      if constexpr (!Tile::kOwnStrips) {
        fence_async_proxy();  // gradients have left the queries' place
        release_query();
      }
    }
  }

 private:
  static constexpr int kScores = Tile::kN / 2;
  static constexpr int kSlices = Tile::kN / 16;  // of a block, each the k of one product with keys
  static constexpr int kPartSteps = Tile::kSteps % 2 == 1 ? 1 : 2, kParts = Tile::kSteps / kPartSteps;  // of dQ, by instruction
  __device__ __forceinline__ void wait_key() const { mbarrier_wait(shared_address(&shared_.key_full[key_.slot]), key_.parity); }
  __device__ __forceinline__ void release(uint64_t& empty) const {
    __syncwarp();  // all lanes have read what they need of the slot
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&empty));
  }
  // Slot of the keys of the block before. Registers are scarce: it is found, not kept.
  __device__ __forceinline__ int before() const { return key_.slot == 0 ? Tile::kKeys - 1 : key_.slot - 1; }
  __device__ __forceinline__ void release_query() const { mbarrier_arrive(shared_address(&shared_.query_empty[place_])); }
  // dQ of the block before, begun.
  __device__ __forceinline__ void add_keys() {
    add_product<T>(query_grad_, score_grads_, shared_address(shared_.key[before()][0]));
  }
  __device__ __forceinline__ void pin_query_grad() {
#pragma unroll
    for (int part = 0; part < kParts; ++part) pin_registers(query_grad_[part]);
  }
  // Keys that a query of the tile sees, and queries after the last one as that one.
  __device__ __forceinline__ int end_of_row(int row) const {
    return KeyRange{p_.sequence.causal, work_->keys}.end_of_row(work_->row + row);
  }

  // With this thread's two rows.
  __device__ __forceinline__ const QueryRecord& record() const { return shared_.records[place_][row_ / QueryRecord::kQueries]; }

  __device__ __forceinline__ void begin_tile() {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < 32 * kPartSteps; ++i) query_grad_[part][i] = 0.0f;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      offset_[half] = record().offset[row_ % 32 + 8 * half];
      delta_[half] = record().delta[row_ % 32 + 8 * half];
    }
  }

  // The block whose keys come next in the ring, or -1 after the tile's last one.
  __device__ __forceinline__ int next_block() {
    wait_key();
    int taken = 0;
    if (threadIdx.x % 32 == 0) taken = shared_.taken[key_.slot];  // the lane that releases the slot
    taken = __shfl_sync(0xffffffffu, taken, 0);
    unmasked_ = taken & 1;
    return taken >> 1;
  }
  // Gives back the slot that says so.
  __device__ __forceinline__ void pass_end() {
    release(shared_.key_empty[key_.slot]);
    key_.advance();
  }

  // Keys from the batch row's last one on are not to be read, whatever memory holds there: a dS of 0 would not hide NaN.
  __device__ __forceinline__ void clear_hidden_keys(int block) {
    const int seen = work_->keys - block * Tile::kN;
    if (p_.sequence.key_lengths == nullptr || seen >= Tile::kN) return;
    wait_key();
    clear_rows(shared_address(shared_.key[key_.slot][0]), Tile::kSteps, Tile::kN, seen, kBarrierRowsOwn + consumer_);
  }

  // A block of keys. kFirst: of the tile's. An operand in registers is made while no product is under way: ptxas would wait for
  // each product on its own.
  template <bool kFirst>
  __device__ __forceinline__ void step(int block) {
    constexpr bool kAdds = !kFirst && !Tile::kAhead;    // dQ of the block before is made first
    constexpr int kUnderWay = kFirst || kAdds ? 0 : 1;  // else it goes on
    const uint32_t s_rows = consumer_ * 64 * 128;
    // A warpgroup's first query sees the fewest keys.
    const QueryRecord* own = &shared_.records[place_][consumer_ * 64 / QueryRecord::kQueries];
    const bool careful = (own[0].careful | own[1].careful) != 0 || (block + 1) * Tile::kN > end_of_row(consumer_ * 64);
    if constexpr (!kAdds) wait_key();
    turns_.take();
    wgmma_fence();
    if constexpr (kAdds) add_keys();
    if constexpr (!Tile::kAhead) turns_.pass();  // a product apart, as both want the same values before others can be loaded
    if constexpr (kAdds) {
      wait_key();
      wgmma_fence();
    }
    multiply_rows<T, Tile::kSteps, Tile::kM, Tile::kN>(scores_, shared_address(shared_.query[place_][0]) + s_rows,
                                                       shared_address(shared_.key[key_.slot][0]));
    if constexpr (kAdds) {
      wgmma_wait<1>();
      pin_query_grad();
      release(shared_.key_empty[before()]);
    }
    mbarrier_wait(shared_address(&shared_.value_full[value_.slot]), value_.parity);
    wgmma_fence();
    multiply_rows<T, Tile::kSteps, Tile::kM, Tile::kN>(weight_grads_, shared_address(shared_.grad_out[place_][0]) + s_rows,
                                                       shared_address(shared_.value[value_.slot][0]));
    if constexpr (Tile::kAhead) {
      if constexpr (!kFirst) add_keys();
      turns_.pass();
    }
    wgmma_wait<1 + kUnderWay>();
    pin_registers(scores_);
    if (Tile::kGeneral && p_.mask_type != MaskType::kNone) {
      make_weights_general(block);
    } else if (careful) {
      make_weights<true>(block);
    } else {
      make_weights<false>(block);
    }
    wgmma_wait<kUnderWay>();
    pin_registers(weight_grads_);
    release(shared_.value_empty[value_.slot]);
    value_.advance();
    float factor = Exponents<T>::kUnscale;
    if constexpr (Tile::kGeneral) {
      if (p_.dropout.seed != nullptr) drop(block);
      factor *= p_.keep_factor;
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      weight_grads_[i] = scores_[i] * fmaf(weight_grads_[i], factor, delta_[i / 2 % 2]);
    }
    if (careful) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        if (scores_[i] == 0.0f) weight_grads_[i] = 0.0f;  // whatever a key that is not seen holds
      }
    }
    if constexpr (kUnderWay > 0) {
      wgmma_wait<0>();
      pin_query_grad();
      release(shared_.key_empty[before()]);
    }
    pack<T>(score_grads_, weight_grads_);
    key_.advance();
  }

  // scores_: products -> P times weight_scale.
  template <bool kCareful>
  __device__ __forceinline__ void make_weights(int block) {
    const int first = block * Tile::kN + threadIdx.x % 4 * 2;  // this thread's first key
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float lse = kCareful ? record().lse[row_ % 32 + 8 * half] : 0.0f;
      const int seen = kCareful ? end_of_row(row_ + 8 * half) - first : 0;
#pragma unroll
      for (int i = 2 * half; i < kScores; i += 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if constexpr (kCareful) {
            const float weight = exponents_.careful_weight(scores_[i + e], lse, offset_[half]);
            scores_[i + e] = i / 4 * 8 + e < seen ? weight : 0.0f;
          } else {
            scores_[i + e] = exponents_.weight(scores_[i + e], offset_[half]);
          }
        }
      }
    }
  }

  // Under a mask.
  __device__ __forceinline__ void make_weights_general(int block) {
    const int first = block * Tile::kN + threadIdx.x % 4 * 2;  // this thread's first key
    const auto mask_row = [&](int half) {                      // of the last query for those that do not exist
      return record().mask + min(work_->row + row_ + 8 * half, static_cast<int>(p_.L) - 1) * p_.mask.row_stride;
    };
    const MaskType type = unmasked_ ? MaskType::kNone : p_.mask_type;
    scale_and_mask<T>(scores_, p_.scale_factor, p_.mask, type, mask_row, first, work_->keys);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float lse = record().lse[row_ % 32 + 8 * half];
      const int seen = end_of_row(row_ + 8 * half) - first;
#pragma unroll
      for (int i = 2 * half; i < kScores; i += 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float weight = Exponents<T>::weight_of_score(scores_[i + e], lse, offset_[half]);
          scores_[i + e] = i / 4 * 8 + e < seen ? weight : 0.0f;
        }
      }
    }
  }

  // weight_grads_: dP, 0 where dropout has dropped P.
  __device__ __forceinline__ void drop(int block) {
    visit_kept<kScores>(p_.dropout, work_->n, work_->row + row_, block * Tile::kN, [&](int i, bool kept) {
      if (!kept) weight_grads_[i] = 0.0f;
    });
  }

  const RowsBackwardParams& p_;
  typename Tile::Shared& shared_;
  const Exponents<T> exponents_;
  const Turns<Tile::kShape.turns> turns_;
  const int consumer_;
  const typename Tile::Work* work_;  // of this tile
  RingPlace<Tile::kKeys> key_;       // of a block's keys
  RingPlace<Tile::kValues> value_;   // and of its values
  uint32_t place_;                   // of the tile's queries
  bool unmasked_;                    // of the general instance: whether the mask shows all of the block
  int row_;                          // of this thread's first element in the tile's scores; the other row is 8 below
  float offset_[2], delta_[2];       // of the two rows
  float query_grad_[kParts][32 * kPartSteps];
  float scores_[kScores], weight_grads_[kScores];
  uint32_t score_grads_[kSlices][4];
};

template <class Tile>
__global__ void __launch_bounds__(kRowsBackwardThreads, 1)
    row_grad_kernel(const __grid_constant__ RowsBackwardParams p, const __grid_constant__ RowsBackwardMaps maps,
                    const __grid_constant__ RowsBackwardOrder order, const __grid_constant__ RowsMarks marks) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  typename Tile::Shared& shared = *reinterpret_cast<typename Tile::Shared*>(s_bytes);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // uniform, as the compiler should know
  init_ring(shared.key_full, shared.key_empty, 4 * kRowsBackwardConsumers);
  init_ring(shared.value_full, shared.value_empty, 4 * kRowsBackwardConsumers);
  init_ring(shared.query_full, shared.query_empty, 128 * kRowsBackwardConsumers);
  mbarrier_fence_init();
  __syncthreads();
  if (warpgroup == kRowsBackwardConsumers) {
    give_registers<rows_backward_producer_registers(Tile::kWideProducer)>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);  // uniform as well
    if (Tile::kGeneral && warp == 0) {
      load_keys<Tile>(p, maps, marks, shared, order);
    } else if (warp < 2) {
      if (!elect_thread()) return;
      if (warp == 0) {
        load_keys<Tile>(p, maps, marks, shared, order);
      } else {
        load_queries<Tile>(p, maps, shared, order);
      }
    } else {
      clear_unseen(p, warp);
    }
  } else {
    take_registers<rows_backward_consumer_registers(Tile::kWideProducer)>();
    RowGradConsumer<Tile>(p, shared, warpgroup).run(order);
  }
#else
  __trap();  // never launched: an image for another card must not return what nobody wrote
#endif
}

}  // namespace attention_ext
