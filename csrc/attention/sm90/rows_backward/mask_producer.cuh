// A tile of the mask's gradient in shared memory, what its terms are, and its loading side: a warp.
//
// The lanes find out what 32 terms are at once, as that is divisions, one after another; then one thread loads those that some
// query of theirs sees: of each the records of its queries, and in a ring steps of 64 columns of Q with K, then of dO with V.
#pragma once

#include "attention/sm90/rows_backward/mask_tiles.h"
#include "attention/sm90/rows_backward/parts.cuh"
#include "attention/visibility/key_range.cuh"
#include "device/sm90/tma.cuh"
#include "device/sm90/warpgroup.cuh"
#include "gemm/tile_order.cuh"

namespace attention_ext {

// What a CTA makes: the terms [begin, end) of a tile of the gradient.
struct MaskItem {
  uint32_t tile, split, matrix;  // matrix: of the gradient
  int row_tile, key_tile;        // 0 where it has one row, one column
  uint32_t begin, end;

  __device__ __forceinline__ MaskItem(const MaskTiles& tiles, uint32_t number) {
    tile = number / tiles.splits;
    split = number - tile * tiles.splits;
    const TileIndex at = tile_of(tile, tiles.row_tiles, tiles.key_tiles, 0);
    matrix = static_cast<uint32_t>(at.batch);
    row_tile = at.m;
    key_tile = at.n;
    const uint32_t share = (tiles.terms + tiles.splits - 1) / tiles.splits;
    begin = min(split * share, tiles.terms);
    end = min(begin + share, tiles.terms);
  }
};

// A tile of dS.
struct MaskTerm {
  uint32_t n;    // flat batch index of the score matrix
  int row, key;  // the first ones; row -1: the item has no more terms
  int keys;      // that the queries see, without causal

  MaskTerm() = default;
  __device__ __forceinline__ MaskTerm(const RowsBackwardParams& p, const MaskTiles& tiles, const MaskItem& item,
                                      uint32_t number) {
    const uint32_t summed = tiles.summed_rows * tiles.summed_keys, sharer = number / summed,
                   in_matrix = number - sharer * summed;
    const uint32_t row_tile = in_matrix / tiles.summed_keys;
    n = shared_matrix(p.batch, p.mask_grad, item.matrix, sharer);
    row = (item.row_tile + static_cast<int>(row_tile)) * kMaskTile;
    key = (item.key_tile + static_cast<int>(in_matrix - row_tile * tiles.summed_keys)) * kMaskTile;
    keys = key_range(p.sequence, n, p.S).keys;
  }
  __device__ __forceinline__ KeyRange range(const RowsBackwardParams& p) const { return {p.sequence.causal, keys}; }
  __device__ __forceinline__ bool seen(const RowsBackwardParams& p) const {
    return key < range(p).end_of_tile(row, min(kMaskTile, static_cast<int>(p.L) - row));
  }
};

// Stored_: element of the mask, T_ or float.
template <class T_, class Stored_>
struct MaskGradTile {
  using T = T_;
  using Stored = Stored_;
  static constexpr int kM = kMaskTile, kN = kMaskTile;
  static constexpr int kStep = 64;  // of E or Ev: a row of 128 bytes, the widest swizzle
  static constexpr int kRecords = kM / QueryRecord::kQueries;
  static constexpr int kConsumerThreads = 128 * kRowsBackwardConsumers;
  static constexpr int kSlots = sizeof(Stored) == 2 ? 5 : 4;  // of 32 KB: next to the mask's tile in its own dtype
  static constexpr int kPlaces = 4;                           // of terms, more than the ring has steps of
  static constexpr bool kStrips = sizeof(Stored) == 2;        // results of a half type leave through strips, as whole rows
  static constexpr int kPairs = 16 / (2 * static_cast<int>(sizeof(Stored)));  // of adjacent elements in 16 bytes
  static constexpr int kChunks = kN / 4 / kPairs;                             // of them, a thread's elements of the mask

  // Tiles lie on 1024-byte boundaries, where the swizzle's pattern begins.
  struct Shared {
    alignas(1024) T left[kSlots][kM * kStep];                                                   // queries or gradients
    alignas(1024) T right[kSlots][kN * kStep];                                                  // keys or values
    alignas(1024) T strip[kStrips ? kRowsBackwardConsumers * 4 : 1][kStrips ? 16 * kStep : 8];  // of each warp
    uint4 bias[kChunks]
              [kConsumerThreads];  // the mask's tile, which all terms share: each thread reads what it has copied itself
    uint32_t kept[kN / 64][kConsumerThreads];  // which of a thread's elements dropout keeps, a bit each
    QueryRecord records[kPlaces][kRecords];
    float lines[kRowsBackwardConsumers * 4][kN];  // of a mask of one row or column: what warps have summed
    MaskTerm term[kPlaces];
    MaskTerm found[32];  // the producer's own, with their boxes
    TensorPosition query[32], key[32], grad_out[32], value[32];
    uint64_t full[kSlots];   // TMA arrives with the bytes of a step; the consumers wait
    uint64_t empty[kSlots];  // the consumers' warps arrive; the producer waits
    uint64_t
        term_full[kPlaces];  // TMA arrives with the bytes of records, or the producer after the last term; the consumers wait
    uint64_t term_empty[kPlaces];  // the consumers' threads arrive, as each has read them; the producer waits
  };
  static_assert(sizeof(Shared) <= 227 * 1024, "an SM gives a CTA 227 KB of shared memory");
};

__device__ __forceinline__ int mask_steps(int64_t width) { return (static_cast<int>(width) + 63) / 64; }

template <class Tile>
class MaskProducer {
 public:
  __device__ __forceinline__ MaskProducer(const RowsBackwardParams& p, const RowsBackwardMaps& maps, const MaskTiles& tiles,
                                          typename Tile::Shared& shared)
      : p_(p), maps_(maps), tiles_(tiles), shared_(shared) {}

  // A warp.
  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (uint32_t number = blockIdx.x; number < tiles_.items; number += gridDim.x) {
      const MaskItem item(tiles_, number);
#pragma unroll 1
      for (uint32_t first = item.begin; first < item.end; first += 32) {
        const bool seen = first + lane() < item.end && find(item, first + lane());
        uint32_t left = __ballot_sync(0xffffffffu, seen);
        __syncwarp();  // what the lanes have found is there
        if (elect_thread()) {
#pragma unroll 1
          for (; left != 0; left &= left - 1) load_term(__ffs(static_cast<int>(left)) - 1);
        }
        __syncwarp();  // it has been read
      }
      if (elect_thread()) end_item();
    }
  }

 private:
  static __device__ __forceinline__ uint32_t lane() { return threadIdx.x % 32; }

  // This lane's term; whether some query sees some of its keys.
  __device__ __forceinline__ bool find(const MaskItem& item, uint32_t number) {
    const MaskTerm term(p_, tiles_, item, number);
    if (!term.seen(p_)) return false;
    shared_.found[lane()] = term;
    keep_order();  // one after the other: what they read takes registers
    set_box(shared_.query[lane()], p_.query, term.n, term.row);
    set_box(shared_.key[lane()], p_.key, term.n, term.key);
    set_box(shared_.grad_out[lane()], p_.grad_out, term.n, term.row);
    set_box(shared_.value[lane()], p_.value, term.n, term.key);
    return true;
  }
  __device__ __forceinline__ void set_box(TensorPosition& box, const MatrixView& view, uint32_t n, int row) const {
    box.at[1] = row;
    set_batch(box, p_.batch, view, n);
    keep_order();
  }

  // Of one thread.
  __device__ __forceinline__ uint32_t begin_place(const MaskTerm& term) {
    mbarrier_wait(shared_address(&shared_.term_empty[place_.slot]), place_.parity ^ 1);
    shared_.term[place_.slot] = term;
    return shared_address(&shared_.term_full[place_.slot]);
  }
  __device__ __forceinline__ void load_term(int of) {
    const MaskTerm term = shared_.found[of];
    const uint32_t s_full = begin_place(term);
    mbarrier_arrive_expect_bytes(s_full, sizeof(shared_.records[0]));
    const QueryRecord* g_records = p_.records + static_cast<int64_t>(term.n) * p_.records_of_head;
    bulk_load(shared_address(shared_.records[place_.slot]), g_records + term.row / QueryRecord::kQueries,
              sizeof(shared_.records[0]), s_full);
    place_.advance();
    load_steps(maps_.query, shared_.query[of], maps_.key, shared_.key[of], mask_steps(p_.E));
    load_steps(maps_.grad_out, shared_.grad_out[of], maps_.value, shared_.value[of], mask_steps(p_.Ev));
  }
  __device__ __forceinline__ void end_item() {
    MaskTerm none = {};
    none.row = -1;
    mbarrier_arrive(begin_place(none));
    place_.advance();
  }
  __device__ __forceinline__ void load_steps(const CUtensorMap& left, TensorPosition& left_box, const CUtensorMap& right,
                                             TensorPosition& right_box, int steps) {
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      mbarrier_wait(shared_address(&shared_.empty[slot_.slot]), slot_.parity ^ 1);
      const uint32_t s_full = shared_address(&shared_.full[slot_.slot]);
      mbarrier_arrive_expect_bytes(s_full, sizeof(shared_.left[0]) + sizeof(shared_.right[0]));
      left_box.at[0] = right_box.at[0] = step * Tile::kStep;
      tma_load(shared_address(shared_.left[slot_.slot]), &left, left_box, s_full);
      tma_load(shared_address(shared_.right[slot_.slot]), &right, right_box, s_full);
      slot_.advance();
    }
  }

  const RowsBackwardParams& p_;
  const RowsBackwardMaps& maps_;
  const MaskTiles& tiles_;
  typename Tile::Shared& shared_;
  RingPlace<Tile::kSlots> slot_;
  RingPlace<Tile::kPlaces> place_;
};

}  // namespace attention_ext
