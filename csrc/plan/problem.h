// The facts of a call that the choice of a kernel depends on; limits belong to kernels. Pure host code: no torch, no CUDA, so that
// every decision is tested without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/operand.h"
#include "core/tensors.h"

namespace attention_ext {

// A call of scaled dot-product attention, forward or backward. Sizes: core/tensors.h.
struct Problem {
  int64_t N = 1, L = 1, S = 1, E = 1, Ev = 1;
  int64_t key_group = 1, value_group = 1;  // query heads per head of key and of value; of one head 1, unless keys are split
  int64_t batch_dims = 1;                  // that strides keep apart
  DataType type = DataType::kHalf;
  MaskType mask = MaskType::kNone;
  bool mask_rows = false;     // rows of the mask differ; else one row serves all queries
  int64_t mask_matrices = 1;  // that the mask has of its own
  bool causal = false, dropout = false;
  Operand query, key, value;
  bool out_dense = true;   // its matrices lie one after another
  Operand grad_out;        // of the backward
  bool mask_grad = false;  // the backward makes the mask's gradient

  int64_t visible_keys() const { return causal ? std::min(S, L) : S; }  // by any query
  bool empty() const { return N == 0 || L == 0 || S == 0 || E == 0 || Ev == 0; }
};

// The product of a linear layer: input (M, K), weight (N, K).
struct LinearProblem {
  int64_t M = 1, N = 1, K = 1;
  DataType type = DataType::kFloat;
  Operand input, weight;

  bool empty() const { return M == 0 || N == 0 || K == 0; }
};

}  // namespace attention_ext
