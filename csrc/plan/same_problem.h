// Whether two problems are the same in every fact, for what is remembered of a problem. A fact more does not compile before it
// stands here. Beside problem.h, which kernels include.
#pragma once

#include <tuple>

#include "plan/problem.h"

namespace attention_ext {

inline auto facts_of(const Operand& operand) {
  const auto& [columns_adjacent, rows_apart, heads_apart, strides_in_range, matrices, row_alignment] = operand;
  return std::tie(columns_adjacent, rows_apart, heads_apart, strides_in_range, matrices, row_alignment);
}

inline auto facts_of(const Problem& problem) {
  const auto& [N, L, S, E, Ev, key_group, value_group, batch_dims, type, mask, mask_rows, mask_matrices, causal, dropout, query,
               key, value, out_dense, grad_out, mask_grad] = problem;
  return std::tuple_cat(std::tie(N, L, S, E, Ev, key_group, value_group, batch_dims, type, mask, mask_rows, mask_matrices,
                                 causal, dropout, out_dense, mask_grad),
                        facts_of(query), facts_of(key), facts_of(value), facts_of(grad_out));
}

inline auto facts_of(const LinearProblem& problem) {
  const auto& [M, N, K, type, input, weight] = problem;
  return std::tuple_cat(std::tie(M, N, K, type), facts_of(input), facts_of(weight));
}

}  // namespace attention_ext
