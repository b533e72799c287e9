#include "plan.h"

#include <algorithm>

#include "pipeline/forward_slices.h"

namespace attention_ext {
namespace {

// The table of kernels. A new one is a row here.
struct Row {
  Kernel kernel;
  const char* name;
};
constexpr Row kKernels[] = {{Kernel::kPipeline, "pipeline"},
                            {Kernel::kSm90_512, "sm90_512"},
                            {Kernel::kSm90_1024, "sm90_1024"},
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
  const bool not_empty = rows > 0 && problem.S > 0 && problem.E > 0 && problem.Ev > 0;
  const bool hopper =
      kHasHopperKernels && problem.capability == 90 && problem.element_size == 2 && not_empty && problem.tma_operands;
  if (hopper && width <= 512) {
    return {Kernel::kSm90_512, "a fused kernel for Hopper takes head dims up to 512", 0, false};
  }
  const int64_t bytes =
      rows == 0 ? 0 : forward_slices(problem.B * problem.Hq, problem.L, problem.S, problem.element_size, workspace_cap).bytes;
  if (hopper) {
    return {Kernel::kSm90Pipeline, "the pipeline runs its products by warpgroups on Hopper for head dims above 512", bytes,
            false};
  }
  return {Kernel::kPipeline, "it takes every shape, dtype, mask and stride, and no faster kernel takes this problem", bytes,
          false};
}

}  // namespace attention_ext
