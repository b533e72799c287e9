// Between a call and the tables of kernels: the problem that a call is, and the row that runs it.
#pragma once

#include <string>
#include <tuple>

#include "attention/params.h"
#include "binding/tensors.h"
#include "core/operand.h"
#include "core/recent.h"
#include "plan/kernels.h"
#include "plan/key_pieces.h"
#include "plan/same_problem.h"

namespace attention_ext {

// The one place that makes a problem of a call, of the forward and of the backward, for the operator and for explain alike.
template <class Params>
Problem problem_of(const Params& params, int64_t key_group, int64_t value_group) {
  const int64_t element = element_bytes(params.type);
  Problem problem;
  problem.N = params.N;
  problem.L = params.L;
  problem.S = params.S;
  problem.E = params.E;
  problem.Ev = params.Ev;
  problem.key_group = key_group;
  problem.value_group = value_group;
  problem.batch_dims = params.batch.count;
  problem.type = params.type;
  problem.mask = params.mask_type;
  problem.mask_rows = params.mask.row_stride != 0;
  problem.mask_matrices = mask_matrices(params);
  problem.causal = params.sequence.causal;
  problem.dropout = params.dropout.seed != nullptr;
  problem.query = operand_of(params.batch, params.query, params.L, element);
  problem.key = operand_of(params.batch, params.key, params.S, element);
  problem.value = operand_of(params.batch, params.value, params.S, element);
  problem.out_dense = is_dense(params.batch, params.out, params.L, params.Ev);
  return problem;
}

// Query heads that all read one matrix of keys, and of values, are matrices of their own to the kernels. Where keys of few rows are
// split they are a group: a tile then has all their rows. No causal call is one of these: its rows see as many keys as there
// are rows, and its S is no more. heads: the size of the query's head dim.
inline void group_heads_of_one_key(ForwardParams& params, int64_t heads) {
  const int last = params.batch.count - 1;
  MatrixView &key = params.key, &value = params.value;
  const bool one_key = key.group == 1 && value.group == 1 && key.batch_stride[last] == 0 && value.batch_stride[last] == 0;
  const bool fits = params.query.batch_stride[last] > 0 && params.batch.count < kTensorMapBatchDims;
  const int64_t most_rows = most_split_rows(params.E, params.Ev);
  if (element_bytes(params.type) == 2 && one_key && fits && keys_split(params.L, params.S, heads, most_rows)) {
    key.group = value.group = static_cast<int32_t>(heads);
  }
}

// The row to run: the one of a name, or for "auto" the table's choice. reason: why, a clause; null: not wanted.
template <class Facts, size_t kRows>
size_t choose_row(const std::array<KernelRow<Facts>, kRows>& table, const std::string& name, const Facts& problem,
                  const DeviceInfo& card, int64_t cap, std::string* reason = nullptr) {
  using Chosen = Choice<Facts, kRows>;
  if (name == "auto" && reason == nullptr) {
    struct Key {
      const void* table;
      Facts problem;
      int64_t capability, sms, cap;
      bool operator==(const Key& o) const {
        return std::tie(table, capability, sms, cap) == std::tie(o.table, o.capability, o.sms, o.cap) &&
               facts_of(problem) == facts_of(o.problem);
      }
    };
    thread_local Recent<Key, size_t> recent;
    return recent.find({&table, problem, card.capability, card.sms, cap},
                       [&] { return Chosen(table, problem, card, cap).row(); });
  }
  if (name == "auto") {
    const Chosen choice(table, problem, card, cap);
    *reason = choice.reason();
    return choice.row();
  }
  for (size_t row = 0; row < kRows; ++row) {
    if (name != table[row].name) continue;
    const std::string clause = refusal(table[row], problem, card);
    if (!clause.empty()) {
      fail("kernel_name", "a kernel that takes this problem on this card and is in this build", "\"" + name + "\": " + clause);
    }
    if (reason != nullptr) *reason = "kernel_name asked for it";
    return row;
  }
  fail("kernel_name", "\"auto\" or " + names_of(table), "\"" + name + "\"");
}

}  // namespace attention_ext
