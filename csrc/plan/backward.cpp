// The backward's table of kernels. Their drivers plan their workspaces (backward.cpp in attention/pipeline/ and
// attention/sm90/pipeline/).
#include "plan/cost.h"
#include "plan/kernels.h"

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
template <bool kWgmma>
int64_t cost(const Problem& p, const DeviceInfo& card, int64_t cap) {
  return times(5, pipeline_cost(p, card, cap, kWgmma)) / 2;
}

}  // namespace

const BackwardTable kBackwardKernels = {{
    {"pipeline", 0, [](const Problem&) { return std::string(); }, nullptr, nullptr, cost<false>},
    {"sm90_pipeline", 90, wgmma_refuses, nullptr, nullptr, cost<true>},
}};

}  // namespace attention_ext
