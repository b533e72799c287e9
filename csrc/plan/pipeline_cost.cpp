// What a pipeline takes, by counting, slice by slice: rounds of tiles of the two products over the SMs and the steps of 64 in each,
// the epilogues, the statistics of segments, and the bytes of the operands and of the weights, there and back.
#include "plan/cost.h"
#include "plan/slices.h"

namespace attention_ext {
namespace {

// Of half types; times in ns.
struct PipelineRates {
  int64_t tile_rows, tile_cols;  // of scores
  int64_t ctas_per_sm;
  int64_t first;                   // beginning and end of a call
  int64_t slice;                   // the three launches
  int64_t score_step;              // of a tile of scores, by 64 of E
  int64_t value_step;              // of a tile of 128 x 128 or, by wgmma, 128 x 256 results, by 64 keys
  int64_t score_tile, value_tile;  // epilogues
  int64_t edge;                    // more for 64 keys of a tile of scores that the diagonal or an edge touches
  int64_t mask;                    // the same under a mask
  int64_t edge_rows, mask_rows;    // more for 128 rows there, and where the mask's rows differ
  int64_t statistics;              // of 64 keys in 2^20 rows
  int64_t rewritten;               // more for those where dropout changes weights
  int64_t masked;                  // more for those under a mask
  int64_t bytes;                   // a ns, from memory and L2
};
constexpr PipelineRates kPipeline = {
    .tile_rows = 128,
    .tile_cols = 128,
    .ctas_per_sm = 2,
    .first = 900,
    .slice = 7100,
    .score_step = 1210,
    .value_step = 1205,
    .score_tile = 6460,
    .value_tile = 3700,
    .edge = 2220,
    .mask = 2220,
    .edge_rows = 1420,
    .mask_rows = 930,
    .statistics = 5300,
    .rewritten = 240000,
    .masked = 240000,
    .bytes = 6300,
};
constexpr PipelineRates kSm90Pipeline = {
    .tile_rows = kWgmmaTileRows,
    .tile_cols = kWgmmaTileCols,
    .ctas_per_sm = 1,
    .first = 3800,
    .slice = 6400,
    .score_step = 550,
    .value_step = 620,
    .score_tile = 300,
    .value_tile = 300,
    .edge = 4000,
    .mask = 400,
    .edge_rows = 380,
    .mask_rows = 350,
    .statistics = 38000,
    .rewritten = 286000,
    .masked = 0,
    .bytes = 8300,
};

// float and double run on CUDA cores.
constexpr int64_t slower(int64_t element) { return element == 2 ? 1 : element == 4 ? 8 : 16; }

// Steps whose operand's rows do not begin with a line of L2 wait for it.
constexpr int64_t step_of(int64_t step, int64_t row_alignment) {
  return step + step * (touched_line_bytes(row_alignment) - kLineBytes) / kLineBytes * 31 / 100;
}

}  // namespace

int64_t pipeline_cost(const Problem& p, const DeviceInfo& card, int64_t cap, bool wgmma) {
  const PipelineRates& rates = wgmma ? kSm90Pipeline : kPipeline;
  if (p.empty()) return rates.first + rates.slice;
  const int64_t S = p.visible_keys(), element = element_bytes(p.type), slots = card.sms * rates.ctas_per_sm;
  const ForwardSlices slices = forward_slices(p.N, p.L, S, p.Ev, element, cap, wgmma, card.sms);
  const int64_t value_cols = !wgmma ? 128 : ceil_div(p.Ev, 192) == ceil_div(p.Ev, 256) ? 192 : 256;
  const int64_t score_cols = ceil_div(S, rates.tile_cols), value_tiles = ceil_div(p.Ev, value_cols);
  const int64_t query_steps = ceil_div(p.E, 64), key_steps = ceil_div(S, 64),
                segments = std::min(rates.tile_cols / 64, key_steps);
  const bool masked = p.mask != MaskType::kNone;
  const int64_t pitch_bytes = slices.pitch * element, pitch_alignment = std::min(pitch_bytes & -pitch_bytes, kLineBytes);
  const int64_t score_tile = query_steps * slower(element) * step_of(rates.score_step, p.key.row_alignment) + rates.score_tile;
  const int64_t value_step = (step_of(rates.value_step, p.value.row_alignment) + step_of(rates.value_step, pitch_alignment)) /
                             2 * (wgmma ? value_cols : 256) / 256;
  const int64_t value_tile = times(key_steps, slower(element) * value_step) + rates.value_tile;

  // Of `matrices` times `rows` rows.
  const auto slice = [&](int64_t matrices, int64_t rows) {
    const int64_t row_tiles = matrices * ceil_div(rows, rates.tile_rows);
    const int64_t score_tiles = times(row_tiles, score_cols), out_tiles = times(row_tiles, value_tiles);
    int64_t scores = times(ceil_div(score_tiles, slots), score_tile), values = times(ceil_div(out_tiles, slots), value_tile);
    if (p.causal) {  // tiles above the diagonal are left out or end at once
      const auto seen = [&](int64_t all, int64_t keys, int64_t tile) {
        const int64_t part =
            visible_blocks(p.L, S, rates.tile_rows, keys, true) * 1024 / visible_blocks(p.L, S, rates.tile_rows, keys, false);
        return std::max(times(times(all, part) / 1024, tile) / slots + tile / 2, tile);
      };
      scores = seen(score_tiles, rates.tile_cols, score_tile);
      values = seen(out_tiles, 64, value_tile);
    }
    // Tiles of scores that are not wholly visible. They lie in a pattern, so a CTA may meet one more than the average.
    const int64_t edge =
        segments * ((masked ? rates.mask : rates.edge) + (rates.edge_rows + (p.mask_rows ? rates.mask_rows : 0)) *
                                                             std::min(rows, rates.tile_rows) / rates.tile_rows);
    int64_t edges = score_tiles - matrices * (rows / rates.tile_rows) * (S / rates.tile_cols);
    if (p.causal) edges += matrices * std::min(ceil_div(rows, rates.tile_rows), ceil_div(S, rates.tile_rows));
    const int64_t all_edges = times(std::max<int64_t>(scores / score_tile, 1), edge);
    if (masked || edges >= score_tiles) return rates.slice + scores + values + all_edges;
    return rates.slice + scores + values + (edges > 0 ? std::min(all_edges, times(edges, edge) / slots + edge) : 0);
  };
  int64_t busy;
  if (slices.rows == p.L) {
    busy = times(p.N / slices.batches, slice(slices.batches, p.L));
    if (p.N % slices.batches > 0) busy += slice(p.N % slices.batches, p.L);
  } else {
    busy = times(p.N * (p.L / slices.rows), slice(1, slices.rows));
    if (p.L % slices.rows > 0) busy += times(p.N, slice(1, p.L % slices.rows));
  }
  const int64_t rows = times(p.N, p.L);
  const int64_t changed = p.dropout ? rates.rewritten : masked ? rates.masked : 0;
  busy += times(rows, key_steps, rates.statistics + changed) >> 20;
  const int64_t bytes =
      times(element, times(rows, p.E + p.Ev + 2 * S) + times(p.key.matrices, S, p.E) + times(p.value.matrices, S, p.Ev));
  return std::min(rates.first + busy + bytes / rates.bytes, kMostCost);
}

}  // namespace attention_ext
