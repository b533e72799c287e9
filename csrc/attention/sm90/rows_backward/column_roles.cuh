// The column kernel's consumers by roles, where dK and dV of 64 keys are too many registers for one warpgroup: one makes dV and P,
// the other one dP, dS and dK. Of block j, after block j + 1:
//   dV += P_{j+1} dO_{j+1}, S_j = K Q_j^T begin  | S_j is there: P_j, packed, and stored in float for the other role
//   dK += dS_{j+1} Q_{j+1}, dP_j = V dO_j^T begin | dP_j is there, and P_j: dS_j, packed
// The sum comes first, as it gives the stage back: there are two. Each role runs under the other one's products, a part of a block
// behind it. A warp hands P to the warp that has the same keys and queries, thread to thread, so nothing is swizzled.
// Registers: 128 or 96 of dV or dK, 32 or 48 of S or dP, half as many of P or dS.
#pragma once

#include "attention/sm90/rows_backward/column_general.cuh"

namespace attention_ext {

// kOfKeys: makes dK, else dV.
template <class Tile, bool kOfKeys>
class ColumnRole {
 public:
  using T = typename Tile::T;

  __device__ __forceinline__ ColumnRole(const RowsBackwardParams& p, typename Tile::Shared& shared) : p_(p), shared_(shared) {}

  __device__ __forceinline__ void run(const RowsBackwardOrder& order) {
    RowsPlaces places(order.tiles);
#pragma unroll 1
    while (places.next()) {
      place_ = places.template query<Tile::kPlaces>();
      mbarrier_wait(shared_address(&shared_.key_full[place_]), places.template parity<Tile::kPlaces>());
      const auto& work = shared_.work[places.round() % Tile::kWorks];
      work_ = &work;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int i = 0; i < 32 * kPartSteps; ++i) sums_[part][i] = 0.0f;
      }
      int left = (work.end - work.begin) * static_cast<int>(work.heads);
      if (left > 0) {
        step<true>();
#pragma unroll 1
        while (Tile::kGeneral ? !is_last(before_.slot) : --left > 0) step<false>();
        add_block();
        wgmma_wait<0>();
        pin_sums();
        release();
      }
      finish(work);
      fence_async_proxy();  // gradients have left the operand's place
      mbarrier_arrive(shared_address(&shared_.key_empty[place_]));
    }
  }

 private:
  static constexpr int kScores = Tile::kM / 2;
  static constexpr int kSlices = Tile::kM / 16;  // of a block, each the k of one product with queries or their gradients
  static constexpr int kPartSteps = Tile::kSteps % 2 == 1 ? 1 : 2,
                       kParts = Tile::kSteps / kPartSteps;  // of sums, by instruction

  // Whether the block in a stage that has not been released is the tile's last one. Of the general instance.
  __device__ __forceinline__ bool is_last(int slot) const { return (shared_.marked[slot] & kLastOfTile) != 0; }
  // Queries with their records, else their gradients.
  __device__ __forceinline__ void wait(bool queries, const RingPlace<Tile::kStages>& stage) const {
    mbarrier_wait(shared_address(queries ? &shared_.full[stage.slot] : &shared_.grad_full[stage.slot]), stage.parity);
  }
  __device__ __forceinline__ void pin_sums() {
#pragma unroll
    for (int part = 0; part < kParts; ++part) pin_registers(sums_[part]);
  }
  // dV or dK of the block before, begun.
  __device__ __forceinline__ void add_block() {
    if constexpr (!kOfKeys) wait(false, before_);
    wgmma_fence();
    add_product<T>(sums_, operand_,
                   shared_address(kOfKeys ? shared_.query[before_.slot][0] : shared_.grad_out[before_.slot][0]));
  }
  // The stage of the block before.
  __device__ __forceinline__ void release() const { mbarrier_arrive(shared_address(&shared_.empty[before_.slot])); }

  // A block of queries. kFirst: of the tile's.
  template <bool kFirst>
  __device__ __forceinline__ void step() {
    const int slot = stage_.slot;
    if constexpr (!kFirst) add_block();
    wait(!kOfKeys, stage_);
    wgmma_fence();
    multiply_rows<T, Tile::kSteps, Tile::kN, Tile::kM>(
        scores_, shared_address(kOfKeys ? shared_.value[place_][0] : shared_.key[place_][0]),
        shared_address(kOfKeys ? shared_.grad_out[slot][0] : shared_.query[slot][0]));
    if constexpr (kOfKeys) wait(true, stage_);  // records come with queries
    const QueryRecord* records = shared_.records[slot];
    const bool careful = column_careful<Tile>(p_, records, *work_, 0);
    if constexpr (!kFirst) {
      wgmma_wait<1>();
      pin_sums();
      release();
    }
    wgmma_wait<0>();
    pin_registers(scores_);
    if constexpr (kOfKeys) {
      float weights[kScores];
      take_weights(weights);
      column_score_grads(scores_, weights, records, careful, Tile::kGeneral && p_.dropout.seed != nullptr,
                         Tile::kGeneral ? Exponents<T>::kUnscale * p_.keep_factor : Exponents<T>::kUnscale);
    } else {
      make_column_weights<Tile>(scores_, p_, records, *work_, 0, careful, Tile::kGeneral ? shared_.marked[slot] : 0);
      if constexpr (Tile::kGeneral) {
        if (p_.dropout.seed != nullptr) mark_dropped_columns<Tile>(scores_, p_, records, *work_, 0);
      }
      pass_weights();
    }
    pack<T, Tile::kGeneral && !kOfKeys>(operand_, scores_);
    before_ = stage_;
    stage_.advance();
    round_ ^= 1;
  }

  __device__ __forceinline__ void pass_weights() {
    const int warp = threadIdx.x / 32 % 4;
    mbarrier_wait(shared_address(&shared_.weights_empty[warp]), round_ ^ 1);
#pragma unroll
    for (int i = 0; i < kScores / 4; ++i) {
      shared_.weights[i][threadIdx.x % 128] = {scores_[4 * i], scores_[4 * i + 1], scores_[4 * i + 2], scores_[4 * i + 3]};
    }
    mbarrier_arrive(shared_address(&shared_.weights_full[warp]));
  }
  __device__ __forceinline__ void take_weights(float (&weights)[kScores]) {
    const int warp = threadIdx.x / 32 % 4;
    mbarrier_wait(shared_address(&shared_.weights_full[warp]), round_);
#pragma unroll
    for (int i = 0; i < kScores / 4; ++i) {
      const float4 four = shared_.weights[i][threadIdx.x % 128];
      weights[4 * i] = four.x;
      weights[4 * i + 1] = four.y;
      weights[4 * i + 2] = four.z;
      weights[4 * i + 3] = four.w;
    }
    mbarrier_arrive(shared_address(&shared_.weights_empty[warp]));
  }

  // Through this warp's rows of the operand that only this role multiplies.
  __device__ __forceinline__ void finish(const typename Tile::Work& work) const {
    const int warp_row = threadIdx.x / 32 % 4 * 16;  // of the tile's keys
    const int rows = static_cast<int>(p_.S) - work.key - warp_row, seen = work.keys - work.key - warp_row;
    const MatrixView& view = kOfKeys ? p_.grad_key : p_.grad_value;
    const int64_t first = (kOfKeys ? work.key_grad : work.value_grad) + warp_row * view.row_stride;
    const uint32_t s_strip = shared_address(kOfKeys ? shared_.value[place_][0] : shared_.key[place_][0]) + warp_row * 128;
    store_grad<T>(sums_, kOfKeys ? p_.scale_factor : Exponents<T>::kUnscale * (Tile::kGeneral ? p_.keep_factor : 1.0f), view,
                  first, rows, seen, static_cast<int>(kOfKeys ? p_.E : p_.Ev), p_.wide_grads, s_strip);
  }

  const RowsBackwardParams& p_;
  typename Tile::Shared& shared_;
  RingPlace<Tile::kStages> stage_, before_;  // of the block, and of the one before
  uint32_t round_ = 0;                       // parity of the number of blocks
  uint32_t place_;                           // of the tile's keys and values
  const typename Tile::Work* work_;          // of this tile
  float sums_[kParts][32 * kPartSteps], scores_[kScores];
  uint32_t operand_[kSlices][4];
};

}  // namespace attention_ext
