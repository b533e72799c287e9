// The backward's table of kernels. Its workspace is planned by the driver (attention/pipeline/backward.cpp).
#include "plan/cost.h"
#include "plan/kernels.h"

namespace attention_ext {

const BackwardTable kBackwardKernels = {{
    {"pipeline", 0, [](const Problem&) { return std::string(); }, nullptr, nullptr,
     [](const Problem& p, const DeviceInfo& card, int64_t cap) {
       return times(5, pipeline_cost(p, card, cap, false)) / 2;  // five products where the forward has two; not fitted
     }},
}};

}  // namespace attention_ext
