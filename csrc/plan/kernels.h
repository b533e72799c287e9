// The tables of kernels, and the choice of one for a problem: the row of the lowest estimated time among those that do not refuse.
// What runs a row stands in csrc/binding, in the same order.
//
// Both libraries compile this folder: _C for tests without a GPU, _cuda for the choice that runs.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "core/device_info.h"
#include "plan/problem.h"

namespace attention_ext {

// Estimated ns where a kernel has no tile for the problem; other estimates end at kMostCost.
constexpr int64_t kNoCost = INT64_MAX, kMostCost = int64_t{1} << 60;

template <class Facts>
struct KernelRow {
  const char* name;
  // That it needs, 10 * major + minor; 0: runs on every card.
  int64_t capability;
  // Why it cannot run a problem, a clause; empty: it can.
  std::string (*refuses)(const Facts&);
  // Why it leaves a problem that it can run to other kernels, unless asked for by name, a clause or null; null: it leaves none.
  const char* (*yields)(const Facts&);
  // Bytes from torch's allocator during a call that may take `cap`; null: its driver plans them.
  int64_t (*workspace)(const Facts&, const DeviceInfo&, int64_t cap);
  // Estimated ns, on a card with an H200's clock and memory.
  int64_t (*cost)(const Facts&, const DeviceInfo&, int64_t cap);
};

using ForwardTable = std::array<KernelRow<Problem>, 6>;
using BackwardTable = std::array<KernelRow<Problem>, 4>;
using LinearTable = std::array<KernelRow<LinearProblem>, 3>;

// The first row of each takes everything. Of equal estimates the earlier row is chosen.
extern const ForwardTable kForwardKernels;
extern const BackwardTable kBackwardKernels;
extern const LinearTable kLinearKernels;

// Whether one of the kernels that bench/results shows faster than PyTorch's own operator takes this kind of problem.
bool preferred(const Problem& problem, const DeviceInfo& card);

// Why none of the kernels for Hopper runs an attention problem, a clause; empty: some may. batch_dims: how many they take.
std::string sm90_refuses(const Problem& problem, int64_t batch_dims);

// Products of a float sum: with fewer its error on CUDA cores is smaller than what two half terms leave out.
constexpr int64_t kFewProducts = 32;

// The same of float32 by half terms, forward and backward.
std::string split_half_refuses(const Problem& problem);
// Why these leave a problem to CUDA cores, a clause; null: they do not.
const char* split_half_yields(const Problem& problem);

// Why a kernel cannot run a problem on a card, a clause; empty: it can.
std::string refusal_of_card(int64_t capability, const DeviceInfo& card);
template <class Facts>
std::string refusal(const KernelRow<Facts>& row, const Facts& problem, const DeviceInfo& card) {
  const std::string clause = row.refuses(problem);
  return clause.empty() ? refusal_of_card(row.capability, card) : clause;
}

template <class Facts, size_t kRows>
class Choice {
 public:
  Choice(const std::array<KernelRow<Facts>, kRows>& table, const Facts& problem, const DeviceInfo& card, int64_t cap)
      : table_(table) {
    for (size_t row = 0; row < kRows; ++row) {
      against_[row] = refusal(table[row], problem, card);
      const char* yields = table[row].yields == nullptr ? nullptr : table[row].yields(problem);
      if (against_[row].empty() && yields != nullptr) against_[row] = yields;
      costs_[row] = table[row].cost(problem, card, cap);
    }
    row_ = cheapest([&](size_t row) { return against_[row].empty(); });
  }

  size_t row() const { return row_; }

  // A clause: why this one, and why not the fastest of those that cannot.
  std::string reason() const {
    const size_t next = cheapest([&](size_t row) { return row != row_ && against_[row].empty(); });
    const size_t faster = cheapest([&](size_t row) { return !against_[row].empty() && costs_[row] < costs_[row_]; });
    std::string text = next == kRows ? "no other kernel takes it"
                                     : "its estimate of " + estimate(row_) + " is the lowest, before " + table_[next].name +
                                           "'s " + estimate(next);
    if (faster == kRows) return text;
    return text + "; " + table_[faster].name + " would take " + estimate(faster) + ", but " + against_[faster];
  }

 private:
  template <class Predicate>
  size_t cheapest(const Predicate& counts) const {
    size_t best = kRows;
    for (size_t row = 0; row < kRows; ++row) {
      if (counts(row) && (best == kRows || costs_[row] < costs_[best])) best = row;
    }
    return best;
  }
  std::string estimate(size_t row) const { return std::to_string((costs_[row] + 500) / 1000) + " us"; }

  const std::array<KernelRow<Facts>, kRows>& table_;
  std::string against_[kRows];
  int64_t costs_[kRows];
  size_t row_;
};

// one of the kernels "pipeline", "sm90_256" and "sm90_512": the names of a table, for a sentence.
template <class Facts, size_t kRows>
std::string names_of(const std::array<KernelRow<Facts>, kRows>& table) {
  std::string text = kRows > 1 ? "one of the kernels " : "";
  for (size_t row = 0; row < kRows; ++row) {
    text += (row == 0 ? "\"" : row + 1 < kRows ? ", \"" : " and \"") + std::string(table[row].name) + "\"";
  }
  return text;
}

}  // namespace attention_ext
