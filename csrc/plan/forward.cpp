#include <algorithm>

#include "core/arithmetic.h"
#include "plan/plan.h"
#include "plan/slices.h"

namespace attention_ext {
namespace {

// The table of kernels. A new one is a row here.
struct Row {
  Kernel kernel;
  const char* name;
};
constexpr Row kKernels[] = {{Kernel::kPipeline, "pipeline"},
                            {Kernel::kSm90Fused512, "sm90_512"},
                            {Kernel::kSm90Fused1024, "sm90_1024"},
                            {Kernel::kSm90Pipeline, "sm90_pipeline"}};

constexpr bool kHasHopperKernels = ATTENTION_EXT_HAS_SM90A;  // setup.py: TORCH_CUDA_ARCH_LIST names 9.0a

}  // namespace

const char* kernel_name(Kernel kernel) {
  for (const Row& row : kKernels) {
    if (row.kernel == kernel) return row.name;
  }
  return "unknown";
}

bool kernel_by_name(const std::string& name, Kernel& kernel) {
  for (const Row& row : kKernels) {
    if (name == row.name) {
      kernel = row.kernel;
      return true;
    }
  }
  return false;
}

Plan make_plan(const Problem& problem, int64_t workspace_cap) {
  const int64_t rows = problem.B * problem.Hq * problem.L;
  const int64_t width = std::max(problem.E, problem.Ev);
  const int64_t S = problem.is_causal ? std::min(problem.S, problem.L) : problem.S;  // that any query sees
  const bool not_empty = rows > 0 && problem.S > 0 && problem.E > 0 && problem.Ev > 0;
  const auto workspace = [&](bool wgmma_products) {
    if (rows == 0) return int64_t{0};
    return forward_slices(problem.B * problem.Hq, problem.L, S, problem.Ev, problem.element_size, workspace_cap, wgmma_products)
        .bytes;
  };
  const int64_t group = problem.Hk > 0 ? problem.Hq / problem.Hk : 1;
  const bool in_32_bits = problem.B * problem.Hq < int64_t{1} << 31 && problem.L * group < (int64_t{1} << 31) - 1024;
  const auto pipeline = [&](const std::string& reason) { return Plan{Kernel::kPipeline, reason, workspace(false), false}; };
  if (!not_empty) return pipeline("it takes sizes of 0, which the faster kernels do not");
  if (problem.element_size != 2) return pipeline("it takes float32 and float64, which the faster kernels do not");
  if (problem.capability != 90) {
    const int64_t major = problem.capability / 10, minor = problem.capability % 10;
    return pipeline("it runs on every card, and the faster kernels need compute capability 9.0, not " + std::to_string(major) +
                    "." + std::to_string(minor));
  }
  if (!kHasHopperKernels) return pipeline("this build has no kernels for Hopper, since TORCH_CUDA_ARCH_LIST did not name 9.0a");
  if (!problem.not_for_tma.empty())
    return pipeline("the kernels for Hopper do not take these operands: " + problem.not_for_tma);
  if (!in_32_bits) return pipeline("the kernels for Hopper count rows and heads in 32 bits, and here are more");
  if (S > kMostWgmmaKeys) return pipeline("the kernels for Hopper lose precision beyond 262144 keys");
  // What follows was measured on an H100 (docs/): a fused kernel has one CTA for every 64 query rows and 512 columns of values, which
  // walks over all keys; the pipeline spreads over keys as well, but has three kernels and 128 rows a tile.
  constexpr int64_t kSms = 132;
  const int64_t row_tiles = problem.B * problem.Hk * ((problem.L * group + 63) / 64),
                tiles = row_tiles * ((problem.Ev + 511) / 512);
  const int64_t pipeline_rows =
      problem.B * problem.Hq * round_up(problem.L, 128);  // that it multiplies, those of no query as well
  const bool spreads = 2 * tiles <= kSms && S >= 2048 && (problem.L >= 128 || pipeline_rows <= 1024);
  // Than PyTorch's own: bench/results.
  const bool measured_faster = std::min(problem.E, problem.Ev) > 256 && width <= 1024 && S >= 256 && !problem.dropout;
  if (width <= 512 && !spreads) {
    return {Kernel::kSm90Fused512, "a fused kernel for Hopper takes head dims up to 512", 0, measured_faster};
  }
  // All columns of values in one CTA (few keys), or a share of them where there are CTAs for all shares at once.
  const bool few_keys = problem.E <= 768 ? S <= 128 : S <= 64 && problem.L * group <= 64;
  const bool passes = few_keys || (S <= 256 && (problem.is_causal || row_tiles <= kSms));
  const bool one_wave = tiles <= kSms && (S <= 512 || (problem.L < 128 && pipeline_rows > 4096));
  if (width > 512 && problem.E <= 1024 && (passes || one_wave)) {
    return {Kernel::kSm90Fused1024, "a fused kernel for Hopper takes short problems of head dims up to 1024", 0,
            measured_faster};
  }
  return {Kernel::kSm90Pipeline,
          width > 512 ? "on Hopper the pipeline has its products by warpgroups, for head dims above 512"
                      : "on Hopper the pipeline by warpgroups spreads few query rows and many keys over the card",
          workspace(true), measured_faster};
}

}  // namespace attention_ext
