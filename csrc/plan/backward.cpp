// The backward's table of kernels. Their drivers plan their workspaces (backward.cpp in attention/pipeline/ and
// attention/sm90/pipeline/, rows_backward.cpp in attention/sm90/rows_backward/).
#include "plan/backward_slices.h"
#include "plan/cost.h"
#include "plan/kernels.h"
#include "plan/sm90_column_parts.h"
#include "plan/sm90_mask_tiles.h"
#include "plan/sm90_rows_backward.h"
#include "plan/split_half_backward_slices.h"

namespace attention_ext {
namespace {

// What both backwards for Hopper refuse.
std::string sm90_backward_refuses(const Problem& p) {
  const std::string clause = sm90_refuses(p, kTensorMapBatchDims);
  if (!clause.empty()) return clause;
  if (const char* why = not_for_tma(p.grad_out)) return std::string("grad_out") + why;
  if (p.key_group != p.value_group) return "key and value have different head counts";
  return "";
}

// Of the row kernels.
constexpr int64_t kMostTiles = int64_t{1} << 31;
// Tiles of scores that the gradient of a mask is the sum of.
int64_t mask_terms(const Problem& p) {
  return p.mask_grad ? times(p.N, ceil_div(p.L, kMaskTile), ceil_div(p.S, kMaskTile)) : 0;
}

std::string rows_refuses(const Problem& p) {
  const std::string clause = sm90_backward_refuses(p);
  if (!clause.empty()) return clause;
  if (std::max(p.E, p.Ev) > kMostRowsBackward) return "it takes head dims up to " + std::to_string(kMostRowsBackward);
  if (times(p.L, p.key_group) > kMostWgmmaKeys) {
    return "it loses precision beyond " + std::to_string(kMostWgmmaKeys) + " queries of a key head";
  }
  const int64_t key_tiles =
      times(p.N / p.key_group, ceil_div(p.S, rows_backward_shape(rows_backward_class(p.E, p.Ev)).col_keys));
  if (times(p.N, ceil_div(p.L, kRowsBackwardTile)) >= kMostTiles || std::max(key_tiles, mask_terms(p)) >= kMostTiles) {
    return "it counts tiles in 32 bits, and here are more";
  }
  return "";
}

std::string wgmma_refuses(const Problem& p) {
  const std::string clause = sm90_backward_refuses(p);
  if (!clause.empty()) return clause;
  if (p.E % 8 != 0 || p.Ev % 8 != 0) return "it takes head dims that are multiples of 8";
  return "";
}

// Zeros to dK and dV of keys that no query sees: whichever kernel writes them, memory bounds it.
int64_t unseen_ns(const Problem& p) {
  return times(element_bytes(p.type), times(p.N / p.key_group, p.S - p.visible_keys(), p.E + p.Ev)) / kWrittenBytes;
}

// Five products where the forward has two; not fitted.
int64_t pipeline_backward_cost(const Problem& p, const DeviceInfo& card, int64_t cap) {
  return std::min(times(5, pipeline_cost(p, card, cap, false)) / 2 + unseen_ns(p), kMostCost);
}

// The mask's gradient by the row kernels: all terms of its tiles, of which the estimate takes those that some query sees, and the
// mask and its gradient from and to memory.
int64_t mask_tiles_cost(const Problem& p, int64_t cap) {
  if (mask_terms(p) >= kMostTiles) return kMostCost;
  constexpr int64_t kLaunchNs = 3000;
  const int64_t matrices = std::clamp<int64_t>(p.mask_matrices, 1, p.N), row_tiles = ceil_div(p.L, kMaskTile),
                key_tiles = ceil_div(p.S, kMaskTile);
  const MaskTilesSizes sizes = {
      matrices, p.N / matrices, row_tiles, key_tiles, p.mask_rows || p.L == 1, true, ceil_div(p.E, 64) + ceil_div(p.Ev, 64)};
  const int64_t all = plan_mask_tiles(sizes, cap).ns, element = p.mask == MaskType::kFloat ? 4 : 2;
  const int64_t seen = visible_blocks(p.L, p.S, kMaskTile, kMaskTile, p.causal),
                bytes = times(matrices, p.mask_rows ? p.L : 1, p.S);
  return kLaunchNs + std::max(times(all, seen) / times(row_tiles, key_tiles),
                              times(bytes, element) / kReadBytes + times(bytes, element) / kWrittenBytes);
}

// What its two kernels take by rounds of tiles over the SMs, and before them delta of all rows; then the mask's gradient. Not
// fitted.
int64_t rows_backward_cost(const Problem& p, const DeviceInfo& card, int64_t cap) {
  constexpr int64_t kFirst = 16000, kTile = 3000, kBytesPerNs = 2700, kBytesOfQuery = 13;  // of workspace
  if (std::max(p.E, p.Ev) > kMostRowsBackward) return kNoCost;
  if (p.empty()) return kFirst;
  const bool masked = p.mask != MaskType::kNone;
  const RowsBackwardShape shape = rows_backward_shape(rows_backward_class(p.E, p.Ev), masked || p.dropout);
  // More for 1024 scores of a block, not fitted. The column kernel reads a bias an element at a time.
  const int64_t more = (p.mask == MaskType::kBool ? 25 : masked ? 50 : 0) + (p.dropout ? 35 : 0);
  const int64_t row_ns = shape.row_block_ns + kRowsBackwardTile * shape.row_keys * more / 1024,
                col_ns = shape.col_block_ns + shape.col_keys * shape.col_queries * more / 1024;
  // Blocks that a mask hides are left out. How many is not known: padding and windows hide more than this quarter, noise nothing.
  const int64_t quarters = p.mask == MaskType::kBool && p.visible_keys() >= 4 * shape.row_keys ? 3 : 4;
  const int64_t S = p.visible_keys(), tiles = times(p.N, ceil_div(p.L, kRowsBackwardTile));
  const int64_t longest = kTile + times(ceil_div(S, shape.row_keys), row_ns) * quarters / 4;
  const int64_t seen = times(p.N, visible_blocks(p.L, S, kRowsBackwardTile, shape.row_keys, p.causal), row_ns) / 4 * quarters;
  const int64_t row = p.causal
                          ? std::max(longest, (times(tiles, kTile) + seen) / card.sms)  // they even out but for the longest
                          : times(ceil_div(tiles, card.sms), longest);
  const ColumnSizes sizes = {p.N / p.key_group, p.key_group, p.L, S, p.E, p.Ev, p.causal, masked || p.dropout};
  const ColumnParts parts = plan_column_parts(sizes, cap - times(kBytesOfQuery, p.N, p.L));
  const int64_t column = column_parts_ns(sizes, parts, col_ns * quarters / 4, card.sms) + unseen_ns(p);
  const int64_t mask = p.mask_grad ? mask_tiles_cost(p, cap) : 0;
  return std::min(kFirst + times(p.N, p.L, 4 * p.Ev) / kBytesPerNs + row + column + mask, kMostCost);
}

// What its slices take, before them delta of all rows, and of each the mask's gradient: a launch, and 1.56 ms for 64 x 2048 x 2048
// scores.
int64_t wgmma_backward_cost(const Problem& p, const DeviceInfo& card, int64_t cap) {
  constexpr int64_t kFirst = 20000, kBytesPerNs = 2700, kMostScores = int64_t{1} << 42;  // of which slices can be counted
  constexpr int64_t kSumNs = 5000, kSummedPerNs = 170;
  if (p.empty()) return kFirst;
  if (times(p.L, p.S) > kMostScores) return times(5, pipeline_cost(p, card, cap, true)) / 2;
  const BackwardSizes sizes = {p.N, p.L, p.S, p.E, p.Ev, p.key_group, p.causal, false};
  const int64_t delta = times(p.N, p.L, 4 * p.Ev) / kBytesPerNs;
  const int64_t mask = p.mask_grad ? kSumNs + times(p.N, times(p.L, p.S)) / kSummedPerNs : 0;
  return std::min(kFirst + delta + plan_backward_slices(sizes, cap, card.sms).ns + mask + unseen_ns(p), kMostCost);
}

std::string split_half_backward_refuses(const Problem& p) {
  const std::string clause = split_half_refuses(p);
  if (!clause.empty()) return clause;
  if (p.key_group != p.value_group) return "key and value have different head counts";
  // Gradients would be off by up to four times the error rule's limit.
  if (p.E < kFewProducts)
    return "sums of fewer than " + std::to_string(kFewProducts) + " products are more exact on CUDA cores";
  return "";
}

int64_t split_half_backward_cost(const Problem& p, const DeviceInfo& card, int64_t cap) {
  if (!split_half_refuses(p).empty()) return kNoCost;
  const bool fused = split_half_backward_fuses(p.E, p.Ev, p.dropout, p.mask_grad, p.mask_rows);
  const int64_t mask_matrices = p.mask_grad ? p.mask_matrices : 0;
  const SplitHalfBackwardSizes sizes = {p.N, p.L, p.S, p.E, p.Ev, p.key_group, p.causal, mask_matrices, fused};
  const SplitHalfBackwardPlan plan = plan_split_half_backward(sizes, cap, card.sms);
  return plan.bytes <= cap ? plan.ns : kMostCost;  // the pipeline needs less
}

}  // namespace

const BackwardTable kBackwardKernels = {{
    {"pipeline", 0, [](const Problem&) { return std::string(); }, nullptr, nullptr, pipeline_backward_cost},
    {"sm90_256", 90, rows_refuses, nullptr, nullptr, rows_backward_cost},
    {"sm90_pipeline", 90, wgmma_refuses, nullptr, nullptr, wgmma_backward_cost},
    {"sm90_split_half", 90, split_half_backward_refuses, split_half_yields, nullptr, split_half_backward_cost},
}};

}  // namespace attention_ext
