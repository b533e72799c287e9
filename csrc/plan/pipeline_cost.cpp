// What a pipeline takes, by counting, slice by slice: rounds of tiles of the two products over the SMs and the steps of 64 in each,
// the epilogues, the statistics of segments, and the bytes of the weights, there and back; but a product no less than its operands
// and results take from memory.
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
  int64_t edge;                    // more for 64 keys of a tile of scores under a mask, or that the diagonal or an edge touches
  int64_t mask_rows;               // more for 128 rows there where the mask's rows differ
  int64_t statistics;              // of 64 keys in 2^20 rows
  int64_t rewritten;               // more for those where dropout changes weights
  int64_t masked;                  // more for those under a mask
  int64_t bytes;                   // a ns, of weights, which L2 holds in part
};
constexpr PipelineRates kPipeline = {
    .tile_rows = 128,
    .tile_cols = 128,
    .ctas_per_sm = 2,
    .first = 900,
    .slice = 5600,
    .score_step = 1160,
    .value_step = 1210,
    .score_tile = 6600,
    .value_tile = 7450,
    .edge = 4100,
    .mask_rows = 0,
    .statistics = 7000,
    .rewritten = 240000,
    .masked = 240000,
    .bytes = 5900,
};
constexpr PipelineRates kSm90Pipeline = {
    .tile_rows = kWgmmaTileRows,
    .tile_cols = kWgmmaTileCols,
    .ctas_per_sm = 1,
    .first = 800,
    .slice = 10200,
    .score_step = 720,
    .value_step = 585,
    .score_tile = 155,
    .value_tile = 1040,
    .edge = 1080,
    .mask_rows = 256,
    .statistics = 7000,
    .rewritten = 286000,
    .masked = 31400,
    .bytes = 4370,
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
  const ForwardSlices slices = forward_slices(p.N, p.L, S, p.Ev, element, cap, wgmma, card.sms, p.causal);
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

  // The part of `all` in the blocks of `keys` keys that tiles of so many rows see.
  const auto seen_of = [&](int64_t all, int64_t rows, int64_t keys) {
    if (!p.causal) return all;
    const int64_t seen = visible_blocks(p.L, S, rows, keys, true), blocks = visible_blocks(p.L, S, rows, keys, false);
    return times(all, times(seen, 1024) / blocks) / 1024;
  };
  // Of `matrices` times `rows` rows.
  const auto slice = [&](int64_t matrices, int64_t rows) {
    const int64_t row_tiles = matrices * ceil_div(rows, rates.tile_rows);
    const int64_t score_tiles = times(row_tiles, score_cols), out_tiles = times(row_tiles, value_tiles);
    int64_t scores = times(ceil_div(score_tiles, slots), score_tile), values = times(ceil_div(out_tiles, slots), value_tile);
    if (p.causal) {  // tiles above the diagonal are left out or end at once
      const auto seen = [&](int64_t all, int64_t keys, int64_t tile, int64_t longest) {
        return std::max(times(seen_of(all, rates.tile_rows, keys), tile) / slots + longest / 2, longest);
      };
      scores = seen(score_tiles, rates.tile_cols, score_tile, score_tile);
      values = seen(out_tiles, 64, value_tile, rows < p.L ? seen_of(value_tile, rows, 64) : value_tile);
    }
    // Tiles of scores that are not wholly visible. They lie in a pattern, so a CTA may meet one more than the average.
    const int64_t mask_rows = p.mask_rows ? rates.mask_rows * std::min(rows, rates.tile_rows) / rates.tile_rows : 0;
    const int64_t edge = segments * (rates.edge + mask_rows);
    int64_t edges = score_tiles - matrices * (rows / rates.tile_rows) * (S / rates.tile_cols);
    if (p.causal) edges += matrices * std::min(ceil_div(rows, rates.tile_rows), ceil_div(S, rates.tile_rows));
    const int64_t all_edges = times(std::max<int64_t>(scores / score_tile, 1), edge);
    if (masked || edges >= score_tiles) {
      scores += all_edges;
    } else if (edges > 0) {
      scores += std::min(all_edges, times(edges, edge) / slots + edge);
    }
    // Of a product what memory moves of its operands and results, weights apart, runs under its steps.
    const auto moved = [&](int64_t all_matrices, int64_t of_rows, int64_t width) {
      return times(element, times(ceil_div(matrices * all_matrices, p.N), of_rows, width));
    };
    const int64_t read = moved(p.N, rows, p.E) + moved(p.key.matrices, S, p.E);
    const int64_t read_values = moved(p.value.matrices, S, p.Ev) / kReadBytes + moved(p.N, rows, p.Ev) / kWrittenBytes;
    return rates.slice + std::max(scores, read / kReadBytes) + std::max(values, read_values);
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
  busy += times(seen_of(times(rows, key_steps), rates.tile_rows, 64), rates.statistics + changed) >> 20;
  const int64_t bytes = times(2 * element, seen_of(times(rows, S), rates.tile_rows, 64));
  return std::min(rates.first + busy + bytes / rates.bytes, kMostCost);
}

}  // namespace attention_ext
