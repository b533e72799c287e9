// The linear layer's table of kernels, in the order of LinearKernel (linear/params.h). Its workspace is planned by the driver.
#include "plan/cost.h"
#include "plan/kernels.h"

namespace attention_ext {
namespace {

bool is_float(const LinearProblem& p) { return p.type == DataType::kFloat; }

std::string split_half_refuses(const LinearProblem& p) {
  if (p.empty()) return "it does not take sizes of 0";
  return is_float(p) ? "" : "it takes float32 alone";
}

std::string sm90_refuses(const LinearProblem& p) {
  if (p.empty()) return "it does not take sizes of 0";
  if (p.type == DataType::kDouble) return "it does not take float64";
  if (is_float(p)) return "";  // the half terms lie as TMA reads them, whatever the operands do
  if (const char* clause = not_for_tma(p.input)) return std::string("input") + clause;
  if (const char* clause = not_for_tma(p.weight)) return std::string("weight") + clause;
  return "";
}

// The error of short float sums on CUDA cores is about that of the terms, which only longer ones exceed.
const char* yields_short_sums(const LinearProblem& p) {
  constexpr int64_t kLongSum = 512;
  return is_float(p) && p.K <= kLongSum ? "sums of up to 512 products run on CUDA cores, where their error is smaller"
                                        : nullptr;
}

// ns, by the rates that docs/kernels/linear.md measured; not fitted. step: of a tile of 128 x tile_cols outputs by 64 of K.
int64_t product_cost(const LinearProblem& p, const DeviceInfo& card, int64_t tile_cols, int64_t ctas_per_sm, int64_t step) {
  constexpr int64_t kLaunch = 3000;
  const int64_t tiles = times(ceil_div(p.M, 128), ceil_div(p.N, tile_cols));
  return std::min(kLaunch + times(ceil_div(tiles, card.sms * ctas_per_sm), ceil_div(p.K, 64), step), kMostCost);
}
// Two splits, which read float and write two halves, and what was marked as suspect.
int64_t split_cost(const LinearProblem& p) {
  constexpr int64_t kLaunches = 9000, kBytes = 3000;
  return kLaunches + times(8, times(p.M, p.K) + times(p.N, p.K)) / kBytes;
}

}  // namespace

const LinearTable kLinearKernels = {{
    {"tiled", 0, [](const LinearProblem&) { return std::string(); }, nullptr, nullptr,
     [](const LinearProblem& p, const DeviceInfo& card, int64_t) {
       return element_bytes(p.type) == 2 ? product_cost(p, card, 128, 2, 1210)
                                         : product_cost(p, card, 128, 1, is_float(p) ? 5300 : 10600);
     }},
    {"split_half", 0, split_half_refuses, yields_short_sums, nullptr,
     [](const LinearProblem& p, const DeviceInfo& card, int64_t) {
       return product_cost(p, card, 128, 1, 1800) + split_cost(p);
     }},
    {"sm90_split_half", 90, sm90_refuses, yields_short_sums, nullptr,
     [](const LinearProblem& p, const DeviceInfo& card, int64_t) {
       return is_float(p) ? product_cost(p, card, 128, 1, 900) + split_cost(p) : product_cost(p, card, 256, 1, 580);
     }},
}};

}  // namespace attention_ext
