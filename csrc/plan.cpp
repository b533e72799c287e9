#include "plan.h"

#include "pipeline/forward_slices.h"

namespace attention_ext {
namespace {

// The table of kernels. A new one is a row here.
struct Row {
  Kernel kernel;
  const char* name;
};
constexpr Row kKernels[] = {{Kernel::kPipeline, "pipeline"}};

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
  const int64_t bytes =
      rows == 0 ? 0 : forward_slices(problem.B * problem.Hq, problem.L, problem.S, problem.element_size, workspace_cap).bytes;
  return {Kernel::kPipeline, "it takes every shape, dtype, mask and stride", bytes, false};
}

}  // namespace attention_ext
