// The layout of shared memory that follows from the fused kernels' tile policy (plan/sm90_fused.h), and what a tile of work is.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "attention/sm90/pieces/pieces.cuh"
#include "attention/visibility/key_range.cuh"
#include "device/common/batch.cuh"
#include "device/sm90/tma.cuh"
#include "plan/sm90_fused.h"

namespace attention_ext {

// Blocks of keys whose visibility under a mask a CTA looks up in advance: all that kMostWgmmaKeys allow.
constexpr int kTrackedBlocks = 2048;

// What the CTAs of a launch take.
struct FusedOrder {
  uint32_t tiles;
  int columns;       // of values that a CTA takes: a share of them, or all
  KeyPieces pieces;  // where keys are split: a tile is a group's rows and one piece of the keys
};

// One tile of work. It stays in shared memory, as registers are scarce.
struct FusedWork {
  uint32_t n_group;  // number of the group; its first query head is flat batch index n_group * group
  int group;         // G: query heads per key head
  int first_row;     // in the group's L * G rows
  int rows;          // that exist from there on
  int keys;          // that any row sees
  int open_keys;     // that every row sees
  int first_column;  // of values and of the output
  int begin;         // where keys are split: the piece's first block; the counts of keys end with the piece
  uint32_t piece;    // the same: its number among those of the launch

  // Tiles of a group are adjacent (they share keys and values in L2), causal: longest first; of one tile of rows the shares of
  // columns. kGeneral: that of the kernel; only then there may be key lengths.
  template <class Tile, bool kGeneral>
  __device__ __forceinline__ void init(const ForwardParams& p, const FusedOrder& order, uint32_t flat_tile) {
    const int shares = (static_cast<int>(p.Ev) + order.columns - 1) / order.columns;
    group = p.key.group;
    const int tile_rows = fused_tile_rows(group);
    const int m_tiles = (static_cast<int>(p.L) * group + tile_rows - 1) / tile_rows;
    first_column = flat_tile % shares * order.columns;
    flat_tile /= shares;
    n_group = flat_tile / m_tiles;
    int tile = flat_tile % m_tiles;
    if (p.sequence.causal) tile = m_tiles - 1 - tile;
    first_row = tile * tile_rows;
    if constexpr (Tile::kSplits) {  // one tile of rows
      piece = n_group;
      begin = piece % order.pieces.count * order.pieces.blocks;
      n_group = order.pieces.first_group + piece / order.pieces.count;
    }
    rows = min(static_cast<int>(p.L) * group - first_row, tile_rows);
    KeyRange all = {p.sequence.causal, static_cast<int>(p.S)};
    if constexpr (kGeneral) all = key_range(p.sequence, n_group * group, p.S);
    keys = all.end_of_row(query_of(rows - 1));
    open_keys = all.end_of_row(query_of(0));
    if constexpr (Tile::kSplits) {
      const int end = (begin + order.pieces.blocks) * kFusedKeys;
      keys = min(keys, end);
      open_keys = min(open_keys, end);
    }
  }
  template <class Tile>
  __device__ __forceinline__ int first_block() const {
    return Tile::kSplits ? begin : 0;
  }
  __device__ __forceinline__ KeyRange range(const Sequence& sequence) const { return {sequence.causal, keys}; }
  __device__ __forceinline__ int query_of(int row) const { return (first_row + row) / group; }
  __device__ __forceinline__ uint32_t head_of(int row) const { return n_group * group + (first_row + row) % group; }
  __device__ __forceinline__ int blocks() const { return (keys + kFusedKeys - 1) / kFusedKeys; }
  // Offset of a row of the tile in a view (N, L, ..); of the last row for rows that do not exist.
  __device__ __forceinline__ int64_t offset_of_row(const BatchDims& batch, const MatrixView& view, int row) const {
    row = min(row, rows - 1);
    return batch_offset(batch, view, head_of(row), 0) + query_of(row) * view.row_stride;
  }
  // Slots of values that a block fills, each of slot_keys.
  __device__ __forceinline__ int value_slots(int block, int slot_keys) const {
    return (min(keys - block * kFusedKeys, kFusedKeys) + slot_keys - 1) / slot_keys;
  }
};

// Named barriers; 0 is __syncthreads.
enum FusedBarrier {
  kBarrierConsumers = 1,  // both consumer warpgroups
  kBarrierMarked = 2,     // all warps: the visible blocks are marked
  kBarrierOwn = 3,        // and 4: one consumer warpgroup
};

template <class T_, int kClass_, bool kSplits_>
struct FusedTile {
  using T = T_;
  static constexpr int kClass = kClass_;
  static constexpr bool kSplits = kSplits_;  // whether a tile has a piece of the keys, and leaves what it has summed
  static constexpr FusedTileShape kShape = fused_tile_shape(kClass);
  static constexpr int kM = kFusedRows;
  static constexpr int kN = kFusedKeys;
  static constexpr int kStep = 64;  // of E or Ev: a row of 128 bytes, the widest swizzle
  static constexpr int kValueKeys = kFusedValueKeys;
  static constexpr int kQuerySteps = kShape.query_steps;
  static constexpr int kValueSteps = kShape.value_steps;
  static constexpr int kSlots = kShape.slots;
  static constexpr int kShareColumns = fused_share_columns(kClass);    // of values that registers hold the output of
  static constexpr bool kPasses = kClass > kShareColumns && !kSplits;  // whether a CTA may take all columns in passes
  static constexpr int kConsumers = 2;                                 // warpgroups that multiply; one more loads
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;
  static_assert(128 * (kConsumers * kConsumerRegisters + kProducerRegisters) <= 65536, "an SM has 65,536 registers");

  // Tiles lie on 1024-byte boundaries, where the swizzle's pattern begins.
  struct Shared {
    alignas(1024) T query[kQuerySteps][kM * kStep];
    alignas(1024) T weights[kConsumers][kN / kStep][kM * kStep];
    alignas(1024) T ring[kConsumers][kSlots][kN * kStep];
    FusedWork work[2 * kConsumers + 1];                 // of each consumer, of each ring's producer, of the query's
    TensorPosition key[kConsumers], value[kConsumers];  // each ring's matrices in the maps
    float reference[kConsumers][kM];                    // that a block's weights are relative to
    float factor[kConsumers][kM];                       // from the reference before to this one
    float sum[kConsumers][kM];
    int64_t mask_row[kM];                   // offset of the mask's row, where there is a mask
    uint32_t visible[kTrackedBlocks / 32];  // a bit per block of keys, where there is a mask
    uint64_t query_full;                    // TMA arrives with the query's bytes; the consumers wait
    uint64_t query_empty;                   // the consumers' 8 warps arrive; the query's producer waits
    uint64_t full[kConsumers][kSlots];      // a ring's slot: TMA arrives with its bytes; its warpgroup waits
    uint64_t empty[kConsumers][kSlots];     // the warpgroup's 4 warps arrive; the ring's producer waits
    uint64_t weights_ready[kConsumers];     // the 32 threads that write the rows' numbers arrive; both warpgroups wait
    uint64_t weights_free[kConsumers];      // the other warpgroup's 128 threads arrive; the one that makes them waits
  };
  static_assert(sizeof(Shared) <= 227 * 1024, "an SM gives a CTA 227 KB of shared memory");
  static_assert(kValueSteps * kStep * kValueKeys <= kN * kStep, "a slot of values fits where one of keys does");
};

}  // namespace attention_ext
