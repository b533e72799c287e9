// What the row kernels for Hopper take, by counting: rounds of tiles over the SMs, blocks of keys of a tile; but no less than the
// operands take from memory.
#include "plan/cost.h"
#include "plan/sm90_rows.h"

namespace attention_ext {
namespace {

// ns
constexpr int64_t kLaunch = 2500;
constexpr int64_t kTile = 2000;        // beginning and end of a tile
constexpr int64_t kTileStep = 540;     // of them by 64 of E and of Ev: its queries in, its results out
constexpr int64_t kPieceTile = 1150;   // both of a piece of the keys, which has few rows
constexpr int64_t kCombine = 2550;     // a launch, which combines what pieces left
constexpr int64_t kMaskBlock = 700;    // scores of a block by the instance for masks and dropout
constexpr int64_t kFirstBytes = 3700;  // before bytes come from memory at its rate

}  // namespace

int64_t rows_cost(const Problem& p, const DeviceInfo& card, int64_t cap) {
  if (times(p.N, p.L, ceil_div(p.Ev, 64)) == kMostCost) return kMostCost;
  const int head_dim_class = rows_class(p.E, p.Ev);
  const RowsTileShape shape = rows_tile_shape(head_dim_class);
  const int64_t S = p.visible_keys(), group = std::min<int64_t>(p.key_group, kMostRows);
  const bool general = p.mask != MaskType::kNone || p.dropout;
  const PiecesWorkspace plan = rows_workspace_of(rows_problem(p), cap).pieces;
  const bool split = plan.split.pieces > 1;
  const RowsGrid grid = rows_grid(head_dim_class, general, p.N, static_cast<int>(group), p.L, plan.split.pieces, card.sms);
  const int64_t block = grid.block_ns + (general ? kMaskBlock : 0);
  const int64_t tile = split ? kPieceTile : kTile + kTileStep * (shape.query_steps + shape.value_steps);
  const int64_t blocks = split ? plan.split.blocks : std::max<int64_t>(ceil_div(S, shape.keys), 1);
  const int64_t longest = tile + times(blocks, block);
  // Ends of pieces run under the loads of the next ones.
  int64_t busy = split ? tile + times(grid.rounds, blocks, block) : times(grid.rounds, longest);
  if (p.causal && grid.tiles > card.sms) {  // longest first, and the rest evens out
    const int64_t rows = rows_of_tile(grid.rows, static_cast<int>(group)), groups = p.N / group;
    const int64_t visible = visible_blocks(p.L, S, rows / group, shape.keys, true);
    busy = std::max(longest, (times(grid.tiles, tile) + times(groups, visible, block)) / card.sms + block);
  }
  const int64_t element = element_bytes(p.type);
  const int64_t read = times(element, times(p.N, p.L, p.E) + times(p.key.matrices, S, p.E) + times(p.value.matrices, S, p.Ev));
  const int64_t written = times(element, p.N, times(p.L, p.Ev));
  // What pieces leave is written and read again, in L2 for the most part.
  if (split) busy += kCombine + times(8 * plan.pitch * plan.split.pieces, times(p.N, p.L)) / kReadBytes;
  const int64_t bytes = kFirstBytes + read / kReadBytes + written / kWrittenBytes;
  return std::min(std::max(kLaunch + busy, bytes), kMostCost);
}

}  // namespace attention_ext
