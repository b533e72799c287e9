// The loading side of the row kernels: a thread for keys, values and a bias, in the order in which the consumers need them, and one
// for the query tiles. They run ahead of the consumers, into the next tile of work.
#pragma once

#include "attention/params.h"
#include "attention/sm90/rows/mark.cuh"
#include "attention/sm90/rows/tile.cuh"
#include "device/sm80/cp_async.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tma.cuh"

namespace attention_ext {

// Loads keys and values, and a bias where it has a ring. One thread.
template <class Tile, RowsKind kKind>
class RowsProducer {
 public:
  __device__ __forceinline__ RowsProducer(const ForwardParams& p, const RowsMaps& maps, const RowsMarks& marks,
                                          typename Tile::Shared& shared)
      : p_(p), maps_(maps), marks_(marks), shared_(shared), work_(shared.producer_work) {}

  __device__ __forceinline__ void run(const RowsOrder& order) {
    RowsPlaces places(order.tiles);
#pragma unroll 1
    while (places.next()) {
      work_.init(p_, order, places.place());
      set_batch(shared_.key_box, p_.batch, p_.key, work_.n_group * work_.group);
      set_batch(shared_.value_box, p_.batch, p_.value, work_.n_group * work_.group);
      if constexpr (kBiasRing) set_rows(shared_.bias_box, p_, p_.mask, work_);
      if constexpr (kKind != kPlain) {
        if (marks_.data != nullptr) marked_ = cells_of(marks_, p_.batch, work_.n_group * work_.group);
      }
      int before = -1;
#pragma unroll 1
      for (int block = work_.end - 1; block >= work_.first_block(); --block) {
        int shows = p_.mask_type == MaskType::kNone ? kAllShown : kSomeShown;
        if constexpr (kKind != kPlain) {
          if (marks_.data != nullptr) shows = shown(block);
          if (shows == kNothingShown) continue;
        }
        load(shared_.key_full, shared_.key_empty, shared_.key, key_place_, &maps_.key, shared_.key_box, block, shows);
        if (before >= 0) load_values(before);
        if constexpr (kBiasRing) load_bias(block, order);
        before = block;
      }
      if (before >= 0) load_values(before);
      if constexpr (kKind != kPlain) {  // the end of the tile takes a stage of keys
        mbarrier_wait(shared_address(&shared_.key_empty[key_place_.slot]), key_place_.parity ^ 1);
        shared_.block[key_place_.slot] = -1;
        mbarrier_arrive(shared_address(&shared_.key_full[key_place_.slot]));
        key_place_.advance();
      }
    }
  }

 private:
  using Place = RingPlace<Tile::kStages>;
  static constexpr bool kBiasRing = Tile::bias_ring(kKind);

  // What the mask shows of a block to the tile's rows.
  __device__ __forceinline__ int shown(int block) const {
    const int head_stride = static_cast<int>(marks_.batch_stride[p_.batch.count - 1]);
    const int heads = head_stride == 0 ? 1 : work_.group;
    const bool same = marks_.rows == 1;
    const int first = same ? 0 : work_.query_of(0) / kMarkedRows,
              last = same ? 0 : work_.query_of(work_.rows - 1) / kMarkedRows;
    int least = kAllShown, most = kNothingShown;
#pragma unroll 1
    for (int head = 0; head < heads; ++head) {
#pragma unroll 1
      for (int row = first; row <= last; ++row) {
        const int cell = marks_.data[marked_ + head * head_stride + static_cast<int64_t>(row) * marks_.blocks + block];
        least = min(least, cell);
        most = max(most, cell);
      }
    }
    return least == kAllShown ? kAllShown : most == kNothingShown ? kNothingShown : kSomeShown;
  }

  template <int kSteps>
  __device__ __forceinline__ void load(uint64_t* full, uint64_t* empty,
                                       typename Tile::T (&stages)[Tile::kStages][kSteps][Tile::kN * Tile::kStep], Place& place,
                                       const CUtensorMap* map, const TensorPosition& at, int block, int shows) {
    TensorPosition box = at;
    box.at[1] = block * Tile::kN;
    mbarrier_wait(shared_address(&empty[place.slot]), place.parity ^ 1);
    if constexpr (kKind != kPlain) {
      if (shows >= 0) {  // these are keys
        shared_.block[place.slot] = 2 * block + (shows == kAllShown ? 1 : 0);
      }
    }
    const uint32_t s_full = shared_address(&full[place.slot]);
    mbarrier_arrive_expect_bytes(s_full, sizeof(stages[0]));
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      box.at[0] = step * Tile::kStep;
      tma_load(shared_address(stages[place.slot][step]), map, box, s_full);
    }
    place.advance();
  }
  __device__ __forceinline__ void load_values(int block) {
    load(shared_.value_full, shared_.value_empty, shared_.value, value_place_, &maps_.value, shared_.value_box, block, -1);
  }

  // Last of a block's operands: what it waits for, that consumers have taken the bias of a block before, is the latest.
  __device__ __forceinline__ void load_bias(int block, const RowsOrder& order) {
    TensorPosition box = shared_.bias_box;
    mbarrier_wait(shared_address(&shared_.bias_empty[bias_place_.slot]), bias_place_.parity ^ 1);
    const uint32_t s_full = shared_address(&shared_.bias_full[bias_place_.slot]);
    mbarrier_arrive_expect_bytes(s_full, Tile::kBiasSteps * Tile::box_bytes(order.tile_rows));
#pragma unroll
    for (int step = 0; step < Tile::kBiasSteps; ++step) {
      box.at[0] = block * Tile::kN + step * Tile::kStep;
      tma_load(shared_address(shared_.bias[bias_place_.slot][step]), &maps_.bias, box, s_full);
    }
    bias_place_.advance();
    if constexpr (Tile::kBiasBlocks == 1) {
      // The next block sets out late, so that it should not come all the way from memory.
      if (!order.mask_from_memory || block == 0) return;
#pragma unroll
      for (int step = 0; step < Tile::kBiasSteps; ++step) {
        box.at[0] = (block - 1) * Tile::kN + step * Tile::kStep;
        tma_prefetch(&maps_.bias, box);
      }
    }
  }

  const ForwardParams& p_;
  const RowsMaps& maps_;
  const RowsMarks& marks_;
  typename Tile::Shared& shared_;
  RowsWork<Tile>& work_;
  Place key_place_, value_place_;
  RingPlace<Tile::kBiasBlocks> bias_place_;
  int64_t marked_ = 0;  // the tile's first head in marks_
};

// Says what the consumers work on, and loads the query tiles; columns from E on and queries from L on become zeros. One thread.
template <class Tile, RowsKind kKind>
__device__ __forceinline__ void load_query_rows(const ForwardParams& p, const GroupMaps& maps, typename Tile::Shared& shared,
                                                const RowsOrder& order) {
  RowsPlaces places(order.tiles);
#pragma unroll 1
  while (places.next()) {
    // Free: of the tiles whose queries are released all but the last have been left.
    RowsWork<Tile>& work = shared.work[places.round() % Tile::kWorks];
    work.init(p, order, places.place());
    work.find_heads(p, order);
    TensorPosition box;
    set_rows(box, p, p.query, work);
    const uint32_t slot = places.template query<Tile::kQueries>(), full = shared_address(&shared.query_full[slot]);
    const uint32_t parity = places.template parity<Tile::kQueries>() ^ 1;
    constexpr bool kStrips = Tile::query_strips(kKind);  // then the first columns' place is free later than the others'
    mbarrier_wait(shared_address(kStrips ? &shared.query_rest_empty[slot] : &shared.query_empty[slot]), parity);
    mbarrier_arrive_expect_bytes(full, Tile::kQuerySteps * Tile::box_bytes(order.tile_rows));
#pragma unroll 1
    for (int step = Tile::kQuerySteps - 1; step >= 0; --step) {
      if (kStrips && step == 0) mbarrier_wait(shared_address(&shared.query_empty[slot]), parity);
      box.at[0] = step * Tile::kStep;
      tma_load(shared_address(shared.query[slot][step]), &maps.query, box, full);
    }
  }
}

}  // namespace attention_ext
