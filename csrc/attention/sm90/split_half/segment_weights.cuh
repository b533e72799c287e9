// Products of query and key -> the weights of a segment of 64 keys, for both forms of float32 attention by half terms.
#pragma once

#include "attention/sm90/split_half/split_half.h"
#include "attention/visibility/dropout.cuh"
#include "attention/visibility/score_modifier.cuh"
#include "device/common/math.cuh"
#include "device/sm80/prefetch.cuh"

namespace attention_ext {

// Where a fragment of 64 rows by 64 keys lies, for a thread that holds two of its rows (score_modifier.cuh).
struct SegmentPlace {
  int64_t n, mask;  // the matrix, and the offset of its mask
  KeyRange range;
  int row, end_row;  // the thread's first row, and the first that does not exist
  int open;          // all of the warp's rows see the keys before this one
  int key;           // the segment's first
};

// The keys that all of a warp's 16 rows see; 0 where not all of them exist.
__device__ __forceinline__ int open_keys(const KeyRange& range, int row, int end_row) {
  const int warp_row = row - static_cast<int>(threadIdx.x % 32 / 4);
  return warp_row + 16 <= end_row ? range.end_of_row(warp_row) : 0;
}

// 2^(reference - largest) of whole numbers, 0 where that is no normal float; of -inf, 0.
__device__ __forceinline__ float segment_factor(float reference, float largest) {
  const int power = static_cast<int>(fmaxf(reference - largest, -127.0f));
  return __int_as_float((power + 127) << 23);
}

// Asks for a tile's mask to be in L2 while the products are made that it is added to: registers are short, so it is read a few
// loads at a time, and each of these turns would wait for memory. Of the thread's two rows, kKeys from `key` on; the four lanes
// that share the rows take their sectors in turn.
template <int kKeys>
__device__ __forceinline__ void prefetch_mask(const MatrixView& mask, MaskType type, int64_t offset, int row, int end_row,
                                              int key, int keys) {
  if (!mask.vector) return;
  visit_mask<float>(mask, type, [&](auto* g_mask) {
    constexpr int kSector = 32 / sizeof(*g_mask);  // keys
    key += threadIdx.x % 4 * kSector;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + 8 * half >= end_row) break;
      const auto* g_key = g_mask + offset + (row + 8 * half) * mask.row_stride + key;
#pragma unroll
      for (int i = 0; i < kKeys; i += 4 * kSector) {
        if (key + i < keys) prefetch_sector(g_key + i);
      }
    }
  });
}

// Products of a segment of a thread's two rows to their scores, x * scale + mask, where all keys exist and the mask's floats lie in
// 16 aligned bytes. The four lanes that share a row read 64 bytes of it at once, each 16 of them: what lanes l and l ^ 1 have is
// the pairs of both, 8 keys apart, so they exchange one. g_rows: of the segment's first key.
__device__ __forceinline__ void add_mask(float (&x)[kSegment / 2], float scale, const float* const (&g_rows)[2]) {
  const int lane = threadIdx.x % 4;
  const bool odd = lane % 2 != 0;
  const int first = lane % 2 * 8 + lane / 2 * 4;
  constexpr int kLoads = kSegment / 16;
  float4 quads[2][kLoads];
  keep_order();  // the compiler would begin with these before registers are free
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) quads[half][i] = *reinterpret_cast<const float4*>(g_rows[half] + first + 16 * i);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const float4 own = quads[half][i];
      const float theirs[2] = {__shfl_xor_sync(0xffffffffu, odd ? own.x : own.z, 1),
                               __shfl_xor_sync(0xffffffffu, odd ? own.y : own.w, 1)};
      add_bias(x, 8 * i + 2 * half, scale, odd ? make_float2(theirs[0], theirs[1]) : make_float2(own.x, own.y));
      add_bias(x, 8 * i + 4 + 2 * half, scale, odd ? make_float2(own.z, own.w) : make_float2(theirs[0], theirs[1]));
    }
  }
}

constexpr int kMostSplitHalfExponent = 90;          // of a score's factor: products are up to 2^40
constexpr float kLeastSplitHalfFactor = 0x1p-100f;  // far from where a factor and -inf would make NaN

// x: products in units of 2^exponent, in; weights 2^(score * log2(e) - reference + kShift), out: dropped, but summed before that.
// Returns whether a score is too large for a reference. kMasked: there is a mask. kShift: 15 for terms, 0 for floats, whose
// exponent is more exact without. kSums: else a segment has its reference alone.
template <bool kMasked, int kShift, bool kSums = true>
__device__ __forceinline__ bool make_segment_weights(float (&x)[kSegment / 2], const SplitHalfScoresParams& p,
                                                     const SegmentPlace& at, int exponent, SplitHalfSegment (&segment)[2]) {
  // A score is the product times `factor`: 0 where either side is zeros.
  const float power = exponent < -126 ? 0.0f : __int_as_float((min(exponent, 127) + 127) << 23);
  const float factor = static_cast<float>(p.scale) * power;
  bool too_large = exponent > kMostSplitHalfExponent;
  // Products will do for scores until the exponential where the factor can wait for it.
  const bool products = !kMasked && factor > kLeastSplitHalfFactor;
  const float before = products ? 1.0f : factor, unit = (products ? factor : 1.0f) * kLog2E;
  const int key = at.key + threadIdx.x % 4 * 2;
  const auto mask_row = [&](int half) { return at.mask + min(at.row + 8 * half, at.end_row - 1) * p.mask.row_stride; };
  if (kMasked && adds(p.mask_type) && p.mask.vector && at.key + kSegment <= at.range.keys) {
    const float* g_mask = static_cast<const float*>(p.mask.data) + at.key;
    add_mask(x, before, {g_mask + mask_row(0), g_mask + mask_row(1)});
  } else if (kMasked || !products) {
    scale_and_mask<float>(x, before, p.mask, kMasked ? p.mask_type : MaskType::kNone, mask_row, key, at.range.keys);
  }
  if (at.key + kSegment > at.open) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      hide_keys(x, half, key, at.row + 8 * half < at.end_row ? at.range.end_of_row(at.row + 8 * half) : 0);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float largest = negative_infinity(0.0f);
#pragma unroll
    for (int i = 2 * half; i < kSegment / 2; i += 4) largest = maximum(largest, maximum(x[i], x[i + 1]));
    largest = warp_max<4>(largest);
    float reference = ceilf(largest * unit), sum = 0.0f;
    const bool none = largest == negative_infinity(0.0f), below = !none && reference < kFarBelow;
    too_large = too_large || (reference > kFarAbove && reference < __int_as_float(0x7f800000));
    float visible = static_cast<float>(at.range.end_of_row(at.row + 8 * half) - at.key);
    if constexpr (kMasked && kSums) {
      // One key is what counts: two of each lane's, which most masks show, will do.
      visible = 2.0f;
      const bool two = x[2 * half] > negative_infinity(0.0f) && x[2 * half + 1] > negative_infinity(0.0f);
      if (!__all_sync(0xffffffffu, two)) {
        visible = 0.0f;
#pragma unroll
        for (int i = 2 * half; i < kSegment / 2; i += 4) {
#pragma unroll
          for (int e = 0; e < 2; ++e) visible += x[i + e] > negative_infinity(0.0f) ? 1.0f : 0.0f;
        }
        visible = warp_sum<4>(visible);
      }
    }
    // Weights of keys that are far below are 0, unless the row sees no others.
    const float offset = none || below ? 0.0f : static_cast<float>(kShift) - reference;
#pragma unroll
    for (int i = 2 * half; i < kSegment / 2; i += 4) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        x[i + e] = below ? 0.0f : exp2_approx(fmaf(x[i + e], unit, offset));
        if constexpr (kSums) sum += x[i + e];
      }
    }
    if (below) reference = kFarBelow;
    if constexpr (kSums) {
      sum = warp_sum<4>(sum) * (1.0f / (1 << kShift));
      if (!(sum == sum)) reference = 0.0f;  // so that it takes part
      if (visible == 1.0f) sum = -sum;
    }
    segment[half] = {reference, sum};
  }
  if (p.dropout.seed != nullptr) {
    visit_kept<kSegment / 2>(p.dropout, at.n, at.row, at.key, [&](int i, bool kept) {
      if (!kept) x[i] = 0.0f;
    });
  }
  return too_large;
}

// The high terms of pairs of weights; x becomes what they leave, for the low ones.
__device__ __forceinline__ void take_term(float (&x)[kSegment / 2], uint32_t (&pairs)[kSegment / 4]) {
#pragma unroll
  for (int i = 0; i < kSegment / 4; ++i) {
    pairs[i] = pack_pair<__half>(x[2 * i], x[2 * i + 1]);
    const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&pairs[i]));
    x[2 * i] -= high.x;
    x[2 * i + 1] -= high.y;
  }
}

}  // namespace attention_ext
