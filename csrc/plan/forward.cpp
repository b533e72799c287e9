// The forward's table of kernels.
#include "plan/cost.h"
#include "plan/kernels.h"
#include "plan/slices.h"
#include "plan/sm90_fused.h"
#include "plan/sm90_rows.h"
#include "plan/split_half_slices.h"

namespace attention_ext {
namespace {

const char* name_of(DataType type) {
  switch (type) {
    case DataType::kHalf: return "float16";
    case DataType::kBFloat16: return "bfloat16";
    case DataType::kFloat: return "float32";
    case DataType::kDouble: return "float64";
  }
  return "another dtype";
}

// rows: of a tile.
std::string fused_refuses(const Problem& p, int64_t most_E, int64_t most_Ev, int64_t rows) {
  const int64_t group = p.key_group;
  if (p.E > most_E || p.Ev > most_Ev) return "it takes head dims up to " + std::to_string(most_E);
  // The group's heads are one more dim of the query's tensor map.
  const std::string clause = sm90_refuses(p, kTensorMapBatchDims - (group > 1 ? 1 : 0));
  if (!clause.empty()) return clause;
  if (group != p.value_group) return "key and value have different head counts";
  if (group > rows) return "more than " + std::to_string(rows) + " query heads share a key head";
  if (group > 1 && !p.query.heads_apart) return "query's heads, of which several share a key head, are broadcast";
  const int64_t row_tiles = ceil_div(p.L * group, rows / group * group);
  if (p.L * group >= (int64_t{1} << 31) - 1024 || times(p.N / group, row_tiles, ceil_div(p.Ev, 128)) >= int64_t{1} << 31) {
    return "it counts rows and tiles in 32 bits, and here are more";
  }
  return "";
}

constexpr int64_t kMost256 = 256, kMost512 = 512, kMost1024 = 1024;
constexpr int64_t kMostSplit256 = 192;  // widest heads whose keys sm90_256 splits

// The class of head dims of the kernel that splits the keys of a call of few rows; 0: they are not split. By head dims, rows and
// keys alone: pieces of another kernel have other bits, and a row's are not to depend on the batch. Above 192, sm90_512 takes 18 to
// 26 % less than sm90_256 for one key head, and 7 % more for 128.
int64_t splitting_class(const Problem& p) {
  const int64_t width = std::max(p.E, p.Ev);
  const auto splits = [&](int64_t most_rows) { return keys_split(p.L, p.visible_keys(), p.key_group, most_rows); };
  if (width <= kMost256 && !(width > kMostSplit256 && splits(kWideSplitRows))) return splits(kSplitRows) ? kMost256 : 0;
  if (!splits(kWideSplitRows)) return 0;
  return width <= kMost512 ? kMost512 : kMost1024;
}
// Of the kernel of a class, and of sm90_pipeline (0), which takes them where that one cannot.
template <int64_t kClass>
const char* leaves_keys_to_split(const Problem& p) {
  const int64_t of = splitting_class(p);
  if (of == kClass || of == 0) return nullptr;
  if (kClass == 0 && !fused_refuses(p, of, of == kMost1024 ? INT64_MAX : of, kSplitRows).empty()) return nullptr;
  return "few rows, whose keys are split, are another kernel's at these head dims for any batch";
}

constexpr int64_t kMostSplitHalfMatrices = int64_t{1} << 18, kMostSplitHalfKeys = int64_t{1} << 16;

template <bool kWgmma>
int64_t slices_workspace(const Problem& p, const DeviceInfo& card, int64_t cap) {
  if (p.N == 0 || p.L == 0) return 0;
  return forward_slices(p.N, p.L, p.visible_keys(), p.Ev, element_bytes(p.type), cap, kWgmma, card.sms, p.causal).bytes;
}
int64_t rows_workspace(const Problem& p, const DeviceInfo&, int64_t cap) {
  return rows_workspace_of(rows_problem(p), cap).bytes();
}
int64_t pieces_workspace_of(const Problem& p, const DeviceInfo&, int64_t cap) {
  return fused_workspace(p.N, p.L, p.visible_keys(), p.Ev, p.key_group, cap).bytes();
}
SplitHalfSlices split_half_plan(const Problem& p, const DeviceInfo& card, int64_t cap) {
  const SplitHalfSizes sizes = {p.N, p.L, p.visible_keys(), p.E, p.Ev, p.key_group, p.value_group, p.causal, p.out_dense};
  return split_half_slices(sizes, cap, card.sms);
}
int64_t split_half_workspace(const Problem& p, const DeviceInfo& card, int64_t cap) {
  return p.empty() ? 0 : split_half_plan(p, card, cap).bytes;
}
int64_t split_half_cost(const Problem& p, const DeviceInfo& card, int64_t cap) {
  if (!split_half_refuses(p).empty()) return kNoCost;
  const SplitHalfSlices slices = split_half_plan(p, card, cap);
  return slices.bytes <= cap ? std::min(slices.ns, kMostCost) : kMostCost;  // the pipeline needs less, in the end a row
}

// The kinds of problem that bench/results has as faster. Of float32 the smallest has 512 rows and keys, and 2^26 scores.
bool measured_faster(const Problem& p) {
  constexpr int64_t kMinScores = int64_t{1} << 24;
  const int64_t narrow = std::min(p.E, p.Ev), keys = p.visible_keys();
  if (p.dropout || std::max(p.E, p.Ev) > kMost1024) return false;
  if (element_bytes(p.type) == 2) return narrow > 256 && keys >= 256;
  return p.type == DataType::kFloat && narrow >= 64 && std::min(p.L, keys) >= 512 && times(p.N, p.L, keys) >= kMinScores;
}

}  // namespace

std::string split_half_refuses(const Problem& p) {
  if (p.empty()) return "it does not take sizes of 0";
  if (p.type != DataType::kFloat) return std::string("it takes float32, not ") + name_of(p.type);
  if (p.visible_keys() > kMostSplitHalfKeys) return "it loses precision beyond " + std::to_string(kMostSplitHalfKeys) + " keys";
  if (p.N > kMostSplitHalfMatrices) return "it keeps facts of up to " + std::to_string(kMostSplitHalfMatrices) + " heads";
  if (times(p.N, std::max(p.L, p.S), std::max(p.E, p.Ev)) >= int64_t{1} << 46) return "an operand has 2^46 elements and more";
  return "";
}
const char* split_half_yields(const Problem& p) {
  return p.E < kFewProducts || p.visible_keys() < 64
             ? "sums of fewer than 32 products, or of 64 keys, run on CUDA cores, where their error is smaller"
             : nullptr;
}

std::string sm90_refuses(const Problem& p, int64_t batch_dims) {
  if (p.empty()) return "it does not take sizes of 0";
  if (element_bytes(p.type) != 2) return std::string("it takes float16 and bfloat16, not ") + name_of(p.type);
  if (p.visible_keys() > kMostWgmmaKeys) return "it loses precision beyond " + std::to_string(kMostWgmmaKeys) + " keys";
  if (p.N >= int64_t{1} << 31) return "it counts heads in 32 bits, and here are more";
  const struct {
    const char* name;
    const Operand& operand;
  } operands[] = {{"query", p.query}, {"key", p.key}, {"value", p.value}};
  for (const auto& [name, operand] : operands) {
    if (const char* clause = not_for_tma(operand)) return std::string(name) + clause;
  }
  if (p.batch_dims > batch_dims) {
    return "strides keep " + std::to_string(p.batch_dims) + " leading dims apart, and it takes " + std::to_string(batch_dims);
  }
  return "";
}

const ForwardTable kForwardKernels = {{
    {"pipeline", 0, [](const Problem&) { return std::string(); }, nullptr, slices_workspace<false>,
     [](const Problem& p, const DeviceInfo& card, int64_t cap) { return pipeline_cost(p, card, cap, false); }},
    {"sm90_256", 90, [](const Problem& p) { return fused_refuses(p, kMost256, kMost256, kMostRows); },
     leaves_keys_to_split<kMost256>, rows_workspace,
     [](const Problem& p, const DeviceInfo& card, int64_t cap) {
       return std::max(p.E, p.Ev) > kMost256 ? kNoCost : rows_cost(p, card, cap);
     }},
    {"sm90_512", 90, [](const Problem& p) { return fused_refuses(p, kMost512, kMost512, kFusedRows); },
     leaves_keys_to_split<kMost512>, pieces_workspace_of,
     [](const Problem& p, const DeviceInfo& card, int64_t cap) {
       const int64_t width = std::max(p.E, p.Ev);
       return width > kMost512 ? kNoCost : fused_cost(p, card, cap, fused_class_512(width));
     }},
    {"sm90_1024", 90, [](const Problem& p) { return fused_refuses(p, kMost1024, INT64_MAX, kFusedRows); },
     leaves_keys_to_split<kMost1024>, pieces_workspace_of,
     [](const Problem& p, const DeviceInfo& card, int64_t cap) {
       return p.E > kMost1024 ? kNoCost : fused_cost(p, card, cap, fused_class_1024(p.E));
     }},
    {"sm90_pipeline", 90, [](const Problem& p) { return sm90_refuses(p, kTensorMapBatchDims); }, leaves_keys_to_split<0>,
     slices_workspace<true>,
     [](const Problem& p, const DeviceInfo& card, int64_t cap) { return pipeline_cost(p, card, cap, true); }},
    {"sm90_split_half", 90, split_half_refuses, split_half_yields, split_half_workspace, split_half_cost},
}};

bool preferred(const Problem& p, const DeviceInfo& card) {
  if (!measured_faster(p)) return false;
  for (const auto& row : kForwardKernels) {
    const bool yields = row.yields != nullptr && row.yields(p) != nullptr;
    if (row.capability == 90 && !yields && refusal(row, p, card).empty()) return true;
  }
  return false;
}

std::string refusal_of_card(int64_t capability, const DeviceInfo& card) {
  const auto text = [](int64_t of) { return std::to_string(of / 10) + "." + std::to_string(of % 10); };
  if (capability == 0) return "";
  if (card.capability != capability) {
    return "it needs compute capability " + text(capability) + ", not " + text(card.capability);
  }
  return ATTENTION_EXT_HAS_SM90A ? "" : "this build has no kernels for Hopper, since TORCH_CUDA_ARCH_LIST did not name 9.0a";
}

}  // namespace attention_ext
