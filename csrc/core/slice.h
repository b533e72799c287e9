// A part of the score space, and what all kernels that work on one agree on: dropout, and the segments of a row of exponentials.
#pragma once

#include <cstdint>

namespace attention_ext {

// The part of the (N, L, S) score space that one launch works on.
struct Slice {
  int64_t batch_begin, batch_count;
  int64_t row_begin, row_count;
  int64_t col_begin, col_count;
};

// The backward's products, where they are counted.
enum : int { kGradQuery, kGradKey, kGradValue };

struct Dropout {
  const int64_t* seed;  // (1,) in device memory; null: no dropout
  // A weight is dropped iff its 16 random bits, as the upper half of a word, are at most this: 2^16 times the rounded p, times
  // 2^16, less 1. p = 1 gives the largest word, which drops all.
  uint32_t dropped_up_to;
  double keep_scale;  // 1 / (1 - the rounded p), and 0 for p = 1
};

// Exponentials in half types are relative to a reference of their segment of keys, with the segment's statistics next to them.
constexpr int kSegment = 64;  // keys
// The reference of a segment is the multiple of this at or below its maximum: segments of a row mostly share it, and then nothing
// has to be rescaled. exp(8) = 2981 leaves room below half precision's 65504, and weights lie further above its subnormals.
constexpr float kReferenceStep = 8.0f;
struct alignas(16) SegmentStatistics {
  float reference;
  float sum;          // of the exponentials, for the log-sum-exp
  float rounded_sum;  // of the same in the tensors' dtype, for the output: the weight of a row's only key is then exactly 1
};

}  // namespace attention_ext
