// The layout of shared memory that follows from the row kernels' tile policy (plan/sm90_rows.h), and what a tile of work is.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "attention/sm90/pieces/group_maps.cuh"
#include "attention/sm90/pieces/pieces.cuh"
#include "attention/visibility/key_range.cuh"
#include "device/common/batch.cuh"
#include "device/sm90/tma.cuh"
#include "plan/sm90_rows.h"

namespace attention_ext {

// What becomes of the products of query and key, an instance of the kernel each.
enum RowsKind {
  kPlain,    // scores as they come, under a positive scale
  kBias,     // a bias of the query's dtype whose rows are whole chunks of 16 bytes, read ahead
  kGeneral,  // any mask, dropout, any scale
};

struct RowsMaps : GroupMaps {
  CUtensorMap bias;  // in instances that have a ring of it; boxes as of query
};

// In which order the CTAs take the tiles: section after section of heads, in a section the longest tiles of all heads first.
struct RowsOrder {
  uint32_t tiles;
  int tile_rows;           // of a tile: whole queries of all heads of a group (rows_of_tile)
  uint32_t tiles_of_head;  // of key
  int heads_of_section;    // of key; 1: the tiles of a head are adjacent
  uint32_t sharers;  // heads in a row that read the same mask, one of each entry of the first batch dim; 1: in their own order
  bool mask_from_memory;  // the mask is more than L2 holds
  KeyPieces pieces;       // where keys are split: a tile is those rows and one piece of the keys, and pieces count as heads
};

// One tile of work. It stays in shared memory, as registers are scarce.
template <class Tile>
struct RowsWork {
  uint32_t n_group;        // number of the group; its first query head is flat batch index n_group * group
  int group;               // G: query heads per key head
  int first_row;           // in the group's L * G rows
  int rows;                // that exist from there on
  int keys;                // that any row sees
  int piece, begin, end;   // the piece of the keys, where they are split; its blocks
  int64_t mask, out, lse;  // offsets of the group's first head
  int64_t left;            // where keys are split: the tile's first row among those that pieces leave

  __device__ __forceinline__ void init(const ForwardParams& p, const RowsOrder& order, uint32_t place) {
    group = p.key.group;
    const int tile_rows = order.tile_rows;
    const uint32_t all_heads = order.tiles / order.tiles_of_head, of_section = order.tiles_of_head * order.heads_of_section,
                   section = place / of_section;
    const uint32_t heads = min(all_heads - section * order.heads_of_section, order.heads_of_section);
    place -= section * of_section;
    n_group = section * order.heads_of_section + place % heads;
    if (order.sharers > 1) n_group = n_group % order.sharers * (all_heads / order.sharers) + n_group / order.sharers;
    first_row = (order.tiles_of_head - 1 - place / heads) * tile_rows;
    if constexpr (Tile::kSplits) {
      const uint32_t of_launch = n_group / order.pieces.count;
      piece = n_group % order.pieces.count;
      n_group = order.pieces.first_group + of_launch;
    }
    rows = min(static_cast<int>(p.L) * group - first_row, tile_rows);
    keys = key_range(p.sequence, n_group * group, p.S).end_of_row(query_of(rows - 1));
    end = (keys + Tile::kN - 1) / Tile::kN;
    if constexpr (Tile::kSplits) {
      begin = piece * order.pieces.blocks;
      end = min(end, begin + order.pieces.blocks);
    }
  }
  __device__ __forceinline__ void find_heads(const ForwardParams& p, const RowsOrder& order) {
    if constexpr (Tile::kSplits) {
      const int64_t pieces_before = static_cast<int64_t>(n_group - order.pieces.first_group) * order.pieces.count + piece;
      left = pieces_before * (static_cast<int>(p.L) * group) + first_row;
    }
    out = batch_offset(p.batch, p.out, n_group * group, 0);
    lse = batch_offset(p.batch, p.lse, n_group * group, 0);
    mask = p.mask_type == MaskType::kNone ? 0 : batch_offset(p.batch, p.mask, n_group * group, 0);
  }
  __device__ __forceinline__ int query_of(int row) const { return group == 1 ? first_row + row : (first_row + row) / group; }
  __device__ __forceinline__ int head_in_group(int row) const { return group == 1 ? 0 : (first_row + row) % group; }
  __device__ __forceinline__ uint32_t head_of(int row) const { return n_group * group + head_in_group(row); }
  __device__ __forceinline__ int first_block() const { return Tile::kSplits ? begin : 0; }
  // Keys that a row sees, and rows after the last one as that one.
  __device__ __forceinline__ int end_of_row(const Sequence& sequence, int row) const {
    return KeyRange{sequence.causal, keys}.end_of_row(query_of(min(row, rows - 1)));
  }
  // Where in the tile's box of a mask, which TMA brings as it brings the queries, the row of the mask that row uses lies: where
  // queries or heads share one, only the first one's place is filled.
  __device__ __forceinline__ int mask_place(const ForwardParams& p, int row) const {
    const int head = head_in_group(row), query = p.mask.row_stride == 0 ? 0 : row - head;
    return query + (p.mask.batch_stride[p.batch.count - 1] == 0 ? 0 : head);
  }
  // Offset of a row of the tile in a view (N, L, ..) that begins at `first` for the group's first head; of the last row for rows
  // that do not exist.
  __device__ __forceinline__ int64_t offset_of_row(const BatchDims& batch, const MatrixView& view, int64_t first,
                                                   int row) const {
    row = min(row, rows - 1);
    return first + head_in_group(row) * view.batch_stride[batch.count - 1] + query_of(row) * view.row_stride;
  }
};

// The places in the order that a CTA takes: every gridDim.x-th, and every other time around from the other end, so that CTAs which
// got longer tiles of one round get shorter ones of the next.
class RowsPlaces {
 public:
  __device__ __forceinline__ explicit RowsPlaces(uint32_t tiles) : tiles_(tiles) {}
  __device__ __forceinline__ bool next() {
    ++round_;
    return place() < tiles_;
  }
  __device__ __forceinline__ uint32_t place() const {
    return round_ * gridDim.x + (round_ % 2 != 0 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  }
  __device__ __forceinline__ uint32_t round() const { return round_; }  // the CTA's tiles before this one
  // Where the tile's query is in a ring of so many, and the parity of its phase.
  template <int kQueries>
  __device__ __forceinline__ uint32_t query() const {
    return round_ % kQueries;
  }
  template <int kQueries>
  __device__ __forceinline__ uint32_t parity() const {
    return round_ / kQueries & 1;
  }

 private:
  uint32_t tiles_, round_ = ~0u;
};

// Named barriers; 0 is __syncthreads.
enum RowsBarrier {
  kBarrierTurn = 1,     // and as many as there are consumers: a consumer's turn to issue products
  kBarrierRowsOwn = 4,  // the same: a consumer alone
};

template <class T_, int kClass, int kRows>
struct RowsTile {
  using T = T_;
  static constexpr RowsTileShape kShape = rows_tile_shape(kClass);
  static constexpr int kConsumers = kRows / 64;  // warpgroups that multiply; one more loads
  static constexpr int kM = kRows;
  static constexpr int kN = kShape.keys;
  static constexpr int kStep = 64;  // of E or Ev: a row of 128 bytes, the widest swizzle
  static constexpr int kQuerySteps = kShape.query_steps;
  static constexpr int kValueSteps = kShape.value_steps;
  static constexpr int kQueries = kShape.queries;
  static constexpr int kStages = kShape.stages;
  static constexpr bool kSplits = kRows == kSplitRows;  // whether a tile has a piece of the keys, and leaves what it has summed
  static constexpr bool kTurns = kShape.turns && kConsumers > 1;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  // A consumer thread's and a producer's; under a mask the producer looks up hidden blocks. One consumer has enough without.
  static constexpr int consumer_registers(RowsKind kind) { return kConsumers == 3 ? 160 : kind == kPlain ? 240 : 232; }
  static constexpr int producer_registers(RowsKind kind) { return kConsumers == 3 ? 32 : kind == kPlain ? 24 : 40; }
  static_assert(128 * (kConsumers * consumer_registers(kGeneral) + producer_registers(kGeneral)) <= 65536,
                "an SM has 65,536 registers");
  static_assert(128 * (kConsumers * consumer_registers(kPlain) + producer_registers(kPlain)) <= 65536, "the same");
  static constexpr int kBiasBlocks = kRows == kMostRows ? kShape.bias_blocks : 0;
  static constexpr bool bias_ring(RowsKind kind) { return kind == kBias && kBiasBlocks > 0; }  // else it waits in registers
  // Whether a warp's results leave through a strip of its own, or through its rows of the query's place.
  static constexpr bool own_strips(RowsKind kind) { return kShape.own_strips && !kSplits && !bias_ring(kind); }
  static constexpr bool query_strips(RowsKind kind) { return !kSplits && !own_strips(kind); }
  static constexpr int kBiasSteps = kBiasBlocks > 0 ? kN / kStep : 1;  // boxes of a block

  // Of a box of a tile's rows by a step of columns.
  static constexpr uint32_t box_bytes(int tile_rows) { return tile_rows * kStep * sizeof(T); }

  static constexpr int kWorks = kQueries + 2;

  // Tiles lie on 1024-byte boundaries, where the swizzle's pattern begins.
  struct Shared {
    alignas(1024) T query[kQueries][kQuerySteps][kM * kStep];
    alignas(1024) T key[kStages][kQuerySteps][kN * kStep];
    alignas(1024) T value[kStages][kValueSteps][kN * kStep];
    union {
      alignas(1024) T strip[own_strips(kPlain) ? kConsumers * 4 : 1][own_strips(kPlain) ? 16 * kStep : 1];
      alignas(1024) T bias[kBiasBlocks > 0 ? kBiasBlocks : 1][kBiasSteps][kBiasBlocks > 0 ? kM * kStep : 1];
    };
    // Of the producer of keys and values; of the consumers, which the query's producer writes: while it writes the one after next
    // they may still be in the one before.
    RowsWork<RowsTile> producer_work, work[kWorks];
    TensorPosition key_box, value_box, bias_box;
    int64_t mask_row[kM];  // offset of the mask's row, where there is a mask that consumers read from memory
    // Where there may be a mask: twice the block that a stage holds the keys of, plus 1 where the mask shows all of it to all of
    // the tile; -1 after the last one.
    int block[kStages];
    uint64_t query_full[kQueries];        // TMA arrives with the bytes of the query; the consumers wait
    uint64_t query_empty[kQueries];       // the consumers' warps arrive; the query's producer waits
    uint64_t query_rest_empty[kQueries];  // where results leave through the query's first columns: the same of the other ones
    uint64_t key_full[kStages], key_empty[kStages], value_full[kStages], value_empty[kStages];  // the same
    // The same, but that every consumer thread arrives: they read the bias themselves.
    uint64_t bias_full[kBiasBlocks > 0 ? kBiasBlocks : 1], bias_empty[kBiasBlocks > 0 ? kBiasBlocks : 1];
  };
  static_assert(sizeof(Shared) <= 227 * 1024, "an SM gives a CTA 227 KB of shared memory");
};

}  // namespace attention_ext
