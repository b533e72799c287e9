// What turns products of query and key into scores: scale, mask, -inf where a key is hidden or does not exist.
//
// For adjacent keys of a row, as most epilogues hold them, and for fragments as wgmma leaves them: this thread's x[i] are pairs of
// adjacent keys, 8 keys apart, of two rows in turn: row i / 2 % 2, key i / 4 * 8 + i % 2 from the thread's first key on.
#pragma once

#include <type_traits>

#include "attention/visibility/key_range.cuh"
#include "core/tensors.h"
#include "device/common/math.cuh"
#include "device/common/types.cuh"
#include "device/sm80/cp_async.cuh"
#include "device/sm90/warpgroup.cuh"

namespace attention_ext {

// Calls visit with the mask's data as what it is; not without a mask. T: of query.
template <class T, class Visit>
__device__ __forceinline__ void visit_mask(const MatrixView& mask, MaskType type, Visit visit) {
  switch (type) {
    case MaskType::kNone: break;
    case MaskType::kBool: visit(static_cast<const uint8_t*>(mask.data)); break;
    case MaskType::kSameAsQuery: visit(static_cast<const T*>(mask.data)); break;
    case MaskType::kFloat: visit(static_cast<const float*>(mask.data)); break;
  }
}

// Whether a mask's element leaves its key visible.
template <class Stored>
__device__ __forceinline__ bool mask_shows(Stored stored) {
  if constexpr (std::is_same_v<Stored, uint8_t>) {
    return stored != 0;
  } else {
    return to_accumulator(stored) != negative_infinity(Accumulator<Stored>(0));
  }
}

// x += mask, or -inf where a bool mask is False, for the adjacent keys key, key + 1, .. below `end`; g_mask: key's element.
template <class Stored, class Acc, int kCount>
__device__ __forceinline__ void add_mask(Acc (&x)[kCount], const Stored* g_mask, int64_t col_stride, int key, int end) {
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    if (key + e >= end) continue;
    const Stored stored = g_mask[e * col_stride];
    if constexpr (std::is_same_v<Stored, uint8_t>) {
      if (!mask_shows(stored)) x[e] = negative_infinity(Acc(0));
    } else {
      x[e] += static_cast<Acc>(to_accumulator(stored));
    }
  }
}

// x: products of a row with adjacent keys, in; their scores, out. mask_offset: of the matrix.
template <class T, class Acc, int kCount>
__device__ __forceinline__ void make_scores(Acc (&x)[kCount], Acc scale, const MatrixView& mask, MaskType mask_type,
                                            int64_t mask_offset, const KeyRange& range, int row, int key) {
#pragma unroll
  for (int e = 0; e < kCount; ++e) x[e] *= scale;
  const int64_t first = mask_offset + row * mask.row_stride + key * mask.col_stride;
  visit_mask<T>(mask, mask_type, [&](auto* g_mask) { add_mask(x, g_mask + first, mask.col_stride, key, range.keys); });
  const int end = range.end_of_row(row);
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    if (key + e >= end) x[e] = negative_infinity(Acc(0));
  }
}

// Scales and masks a fragment from `key` on. s_mask_row: offsets of the mask's rows in shared memory, the other row's 8 after the
// first's.
template <class T, int kCount>
__device__ __forceinline__ void scale_and_mask(float (&x)[kCount], float scale, const MatrixView& mask, MaskType mask_type,
                                               const int64_t* s_mask_row, int key, int keys) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] *= scale;
  visit_mask<T>(mask, mask_type, [&](auto* g_mask) {
    g_mask += key * mask.col_stride;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      auto* g_key = g_mask + s_mask_row[8 * half];
#pragma unroll
      for (int i = 2 * half; i < kCount; i += 4) {
        if (i % 16 < 4) keep_order();  // eight loads in flight; the compiler would take registers for all
        float pair[2] = {x[i], x[i + 1]};
        add_mask(pair, g_key, mask.col_stride, key + i / 4 * 8, keys);
        x[i] = pair[0];
        x[i + 1] = pair[1];
        g_key = step_pointer(g_key, 8 * mask.col_stride);
      }
    }
  });
}

// -inf for what a row of a fragment does not see.
template <int kCount>
__device__ __forceinline__ void hide_keys(float (&x)[kCount], int half, int key, int end) {
#pragma unroll
  for (int i = 2 * half; i < kCount; i += 4) {
    if (key + i / 4 * 8 >= end) x[i] = negative_infinity(0.0f);
    if (key + i / 4 * 8 + 1 >= end) x[i + 1] = negative_infinity(0.0f);
  }
}

}  // namespace attention_ext
