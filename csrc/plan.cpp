#include "plan.h"

namespace attention_ext {

const char* kernel_name(Kernel kernel) {
  switch (kernel) {
    case Kernel::kTorch:
      return "torch";
  }
  return "unknown";
}

Plan make_plan(const Problem&, int64_t) {
  return {Kernel::kTorch, "no kernel of attention_ext takes CUDA tensors yet", 0, false};
}

}  // namespace attention_ext
