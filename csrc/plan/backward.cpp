// The backward's table of kernels. Their drivers plan their workspaces (backward.cpp in attention/pipeline/ and
// attention/sm90/pipeline/).
#include "plan/backward_slices.h"
#include "plan/cost.h"
#include "plan/kernels.h"
#include "plan/split_half_backward_slices.h"

namespace attention_ext {
namespace {

std::string wgmma_refuses(const Problem& p) {
  const std::string clause = sm90_refuses(p, kTensorMapBatchDims);
  if (!clause.empty()) return clause;
  if (const char* why = not_for_tma(p.grad_out)) return std::string("grad_out") + why;
  if (p.key_group != p.value_group) return "key and value have different head counts";
  if (p.E % 8 != 0 || p.Ev % 8 != 0) return "it takes head dims that are multiples of 8";
  return "";
}

// Five products where the forward has two; not fitted.
int64_t pipeline_backward_cost(const Problem& p, const DeviceInfo& card, int64_t cap) {
  return times(5, pipeline_cost(p, card, cap, false)) / 2;
}

// What its slices take, and before them delta of all rows.
int64_t wgmma_backward_cost(const Problem& p, const DeviceInfo& card, int64_t cap) {
  constexpr int64_t kFirst = 20000, kBytesPerNs = 2700, kMostScores = int64_t{1} << 42;  // of which slices can be counted
  if (p.empty()) return kFirst;
  if (times(p.L, p.S) > kMostScores) return times(5, pipeline_cost(p, card, cap, true)) / 2;
  const BackwardSizes sizes = {p.N, p.L, p.S, p.E, p.Ev, p.key_group, p.causal, false};
  const int64_t delta = times(p.N, p.L, 4 * p.Ev) / kBytesPerNs;
  return std::min(kFirst + delta + plan_backward_slices(sizes, cap, card.sms).ns, kMostCost);
}

std::string split_half_backward_refuses(const Problem& p) {
  const std::string clause = split_half_refuses(p);
  if (!clause.empty()) return clause;
  if (p.key_group != p.value_group) return "key and value have different head counts";
  if (p.mask_grad) return "it makes no gradient of the mask";
  return "";
}

int64_t split_half_backward_cost(const Problem& p, const DeviceInfo& card, int64_t cap) {
  if (!split_half_refuses(p).empty()) return kNoCost;
  const SplitHalfBackwardSizes sizes = {p.N, p.L, p.S, p.E, p.Ev, p.key_group, p.causal};
  const SplitHalfBackwardSlices slices = split_half_backward_slices(sizes, cap, card.sms);
  return slices.bytes <= cap ? std::min(slices.ns, kMostCost) : kMostCost;  // the pipeline needs less
}

}  // namespace

const BackwardTable kBackwardKernels = {{
    {"pipeline", 0, [](const Problem&) { return std::string(); }, nullptr, nullptr, pipeline_backward_cost},
    {"sm90_pipeline", 90, wgmma_refuses, nullptr, nullptr, wgmma_backward_cost},
    {"sm90_split_half", 90, split_half_backward_refuses, [](const Problem&) { return "no record has its time yet"; }, nullptr,
     split_half_backward_cost},
}};

}  // namespace attention_ext
