// What the fused kernels for Hopper take, by counting: rounds of tiles over the SMs, blocks of keys of a tile, steps of 64 of E and
// Ev of a block; but no less than a block's lines take from L2, and the operands from memory.
#include "plan/cost.h"
#include "plan/sm90_fused.h"

namespace attention_ext {
namespace {

// ns
constexpr int64_t kLaunch = 1100;
constexpr int64_t kTile = 2700;                       // beginning and end of a tile
constexpr int64_t kTileQueryStep = 25;                // its queries in, by 64 of E
constexpr int64_t kTileValueStep = 300;               // its results out, by 64 of Ev
constexpr int64_t kPieceTile = 800, kPieceStep = 20;  // the first two of a piece of the keys, by 64 of E and of Ev: few rows
constexpr int64_t kNextPiece = 2100;                  // the end of a piece that does not run under the loads of the next one
constexpr int64_t kCombine = 4100;                    // a launch, which combines what pieces left
constexpr int64_t kFreshStep = 155;                   // more for both, where a tile's loads do not run under the one before
constexpr int kAheadSlots = 4;                        // of a ring that has room for some of the next tile's
constexpr int64_t kBlock = 790;                       // a block of keys: softmax and barriers
constexpr int64_t kStep = 140;                        // 64 x 128 x 64 multiply-adds of a block
constexpr int64_t kPass = 2400;                       // more columns of values, after the first ones
constexpr int64_t kMaskTile = 3600;                   // blocks looked up and marked
constexpr int64_t kMaskBlock = 450;                   // scores of a block by the instance for masks and dropout
constexpr int64_t kMaskRows = 420;                    // a block's part of a mask whose rows differ, for 64 of them
constexpr int64_t kFirstBytes = 3700;                 // before bytes come from memory at its rate
constexpr int64_t kL2Bytes = 14500;                   // a ns

}  // namespace

int64_t fused_cost(const Problem& p, const DeviceInfo& card, int64_t cap, int head_dim_class) {
  if (times(p.N, p.L, ceil_div(p.Ev, 64)) == kMostCost) return kMostCost;
  const FusedTileShape shape = fused_tile_shape(head_dim_class);
  const int64_t S = p.visible_keys(), sms = card.sms, group = std::min<int64_t>(p.key_group, kFusedRows);
  const bool masked = p.mask != MaskType::kNone, general = masked || p.dropout;
  const PiecesWorkspace plan = fused_workspace(p.N, p.L, S, p.Ev, p.key_group, cap);
  const bool split = plan.split.pieces > 1;
  const FusedGrid grid =
      fused_grid(head_dim_class, p.N, static_cast<int>(group), p.L, S, p.Ev, p.causal, general, plan.split.pieces, sms);
  const int64_t rows = fused_tile_rows(static_cast<int>(group));
  const int64_t blocks = split ? plan.split.blocks : std::max<int64_t>(ceil_div(S, kFusedKeys), 1);
  const int64_t share = fused_share_columns(head_dim_class), columns = std::min(p.Ev, share);
  const int64_t passes = grid.columns == kAllColumns ? ceil_div(p.Ev, share) : 1;

  const int64_t query_steps = ceil_div(p.E, 64), value_steps = share / 64, loaded_steps = ceil_div(columns, 64);
  const int64_t products = kBlock + kStep * (query_steps + value_steps) + shape.ring_ns * (query_steps + loaded_steps);
  const int64_t lines =
      query_steps * touched_line_bytes(p.key.row_alignment) + loaded_steps * touched_line_bytes(p.value.row_alignment);
  int64_t block = std::max(products, kFusedKeys * lines * std::min(grid.tiles, sms) / kL2Bytes);
  if (general) block += kMaskBlock;
  if (masked && p.mask_rows) block += kMaskRows * std::min(p.L * group, rows) / kFusedRows;
  // A boolean mask that is the same for all queries is taken for the padding of sequences of several lengths, and to hide a quarter
  // of the blocks, which are left out then. What other masks hide is not known.
  if (p.mask == MaskType::kBool && !p.mask_rows) block = block * 3 / 4;

  const int64_t missing_keys = blocks * kFusedKeys - round_up(S, kFusedValueKeys);  // whose values are not multiplied
  const int64_t steps = query_steps + value_steps * passes;
  int64_t tile = split ? kPieceTile + kPieceStep * steps
                       : kTile + kTileQueryStep * query_steps + kTileValueStep * value_steps * passes -
                             kStep * value_steps * passes * std::min<int64_t>(missing_keys, kFusedKeys) / kFusedKeys +
                             (passes - 1) * (kPass + (kStep + shape.ring_ns) * value_steps * blocks);
  if (!grid.ctas_stay || shape.slots < kAheadSlots) tile += kFreshStep * steps;
  if (masked) tile += kMaskTile;

  // Much of a piece's end runs under the loads of the next one, where a CTA takes that.
  const int64_t rounds = ceil_div(grid.tiles, sms), longest = tile + times(blocks, block);
  int64_t busy = times(rounds, blocks, block) + tile + times(rounds - 1, split && grid.ctas_stay ? kNextPiece : tile);
  if (p.causal && grid.tiles > sms) {
    // Longest first within a group, so only the last group's longest tile can come late: when what other SMs run is half done.
    const int64_t groups = p.N / group, row_tiles = ceil_div(p.L * group, rows);
    const int64_t blocks_of_group = visible_blocks(p.L, S, rows / group, kFusedKeys, true);
    const int64_t of_group = times(grid.tiles / (groups * row_tiles), times(row_tiles, tile) + times(blocks_of_group, block));
    const int64_t late = std::max<int64_t>(times(groups - 1, of_group) / sms - of_group / (2 * grid.tiles / groups), 0);
    busy = std::max(times(groups, of_group) / sms, late + longest);
  }
  const int64_t element = element_bytes(p.type);
  const int64_t read = times(element, times(p.N, p.L, p.E) + times(p.key.matrices, S, p.E) + times(p.value.matrices, S, p.Ev));
  const int64_t written = times(element, p.N, times(p.L, p.Ev));
  // What pieces leave is written and read again, in L2 for the most part.
  const int64_t left = split ? times(8 * plan.pitch * plan.split.pieces, times(p.N, p.L)) / kReadBytes : 0;
  const int64_t combine = split ? kCombine + left : 0;
  const int64_t bytes = kFirstBytes + read / kReadBytes + written / kWrittenBytes;
  return std::min(std::max(kLaunch + busy, bytes) + combine, kMostCost);
}

}  // namespace attention_ext
