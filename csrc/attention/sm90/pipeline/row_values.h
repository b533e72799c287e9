// What belongs to the rows of a call, before the kernels of the backward by wgmma: one launch makes all of it.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"

namespace attention_ext {

// What the row kernels want to know of 32 adjacent queries, made once and brought to shared memory next to them. Queries that do
// not exist or see no key have an offset of -inf.
struct alignas(16) QueryRecord {
  static constexpr int kQueries = 32;

  float lse[kQueries], offset[kQueries];  // of their exponents
  float delta[kQueries];                  // what is added to dP
  int64_t mask;                           // where the matrix's part of the mask begins
  uint32_t n;                             // flat batch index of the matrix
  int32_t query;                          // the first one
  int32_t careful;                        // whether some have a weight that is not made of their offset alone
  int32_t unused[3];
};
static_assert(sizeof(QueryRecord) == 416, "a bulk copy takes multiples of 16 bytes");

// Where it goes; null: it is not wanted.
struct RowValues {
  float* delta = nullptr;          // (N, L): sum of grad_out * out over a row, minus grad_lse
  float* norm = nullptr;           // (N, L), of rows with a large log-sum-exp: factors that make their probabilities sum to 1
  QueryRecord* records = nullptr;  // (N, records_of_head), of both
  int32_t records_of_head = 0;     // at least as many as a head has queries for
  bool differences = false;  // whether records are for exponents that are all made of differences of score and log-sum-exp
};

cudaError_t launch_row_values(const BackwardParams& params, const RowValues& values, cudaStream_t stream);

}  // namespace attention_ext
