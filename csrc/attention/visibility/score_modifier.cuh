// What turns products of query and key into scores: scale, mask, -inf where a key is hidden or does not exist.
//
// For adjacent keys of a row, as most epilogues hold them, and for fragments as wgmma leaves them: this thread's x[i] are pairs of
// adjacent keys, 8 keys apart, of two rows in turn: row i / 2 % 2, key i / 4 * 8 + i % 2 from the thread's first key on.
//
// Scale and a mask that is added are one multiply-add, however the mask is read, so bits do not depend on how it lies in memory.
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

// Whether there is a mask to add: then whoever reads it scales as well.
__device__ __forceinline__ bool adds(MaskType type) { return type == MaskType::kSameAsQuery || type == MaskType::kFloat; }

// Whether a mask's element leaves its key visible.
template <class Stored>
__device__ __forceinline__ bool mask_shows(Stored stored) {
  if constexpr (std::is_same_v<Stored, uint8_t>) {
    return stored != 0;
  } else {
    return to_accumulator(stored) != negative_infinity(Accumulator<Stored>(0));
  }
}

// x -> x * scale + mask, or -inf where a bool mask is False, for the adjacent keys key, key + 1, .. below `end`; g_mask: key's
// element.
template <class Stored, class Acc, int kCount>
__device__ __forceinline__ void apply_mask(Acc (&x)[kCount], Acc scale, const Stored* g_mask, int64_t col_stride, int key,
                                           int end) {
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    if (key + e >= end) continue;
    const Stored stored = g_mask[e * col_stride];
    if constexpr (std::is_same_v<Stored, uint8_t>) {
      if (!mask_shows(stored)) x[e] = negative_infinity(Acc(0));
    } else {
      x[e] = fma(x[e], scale, static_cast<Acc>(to_accumulator(stored)));
    }
  }
}

// x: products of a row with adjacent keys, in; their scores, out. mask_offset: of the matrix.
template <class T, class Acc, int kCount>
__device__ __forceinline__ void make_scores(Acc (&x)[kCount], Acc scale, const MatrixView& mask, MaskType mask_type,
                                            int64_t mask_offset, const KeyRange& range, int row, int key) {
  if (!adds(mask_type)) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) x[e] *= scale;
  }
  const int64_t first = mask_offset + row * mask.row_stride + key * mask.col_stride;
  visit_mask<T>(mask, mask_type, [&](auto* g_mask) { apply_mask(x, scale, g_mask + first, mask.col_stride, key, range.keys); });
  const int end = range.end_of_row(row);
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    if (key + e >= end) x[e] = negative_infinity(Acc(0));
  }
}

// For fragments whose rows of the mask begin on 16-byte boundaries: the four lanes that share a row read it 16 bytes at a time, and
// exchange what they read. g_row: the row's element for the first key of the fragment.

// The bits of 16 bytes, 1 where a byte is not 0.
__device__ __forceinline__ uint32_t bits_of_bytes(const uint4& bytes) {
  uint32_t bits = 0;
  const uint32_t word[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t tops = (((word[i] & 0x7f7f7f7fu) + 0x7f7f7f7fu) | word[i]) & 0x80808080u;
    bits |= (tops * 0x00204081u) >> 28 << 4 * i;  // the product brings the four tops side by side
  }
  return bits;
}

template <int kCount>
__device__ __forceinline__ void mask_rows(float (&x)[kCount], float, const uint8_t* const (&g_row)[2]) {
  constexpr int kChunks = kCount / 8, kLoads = (kChunks + 3) / 4;  // of 16 keys
  static_assert(kChunks <= 8, "a lane's chunks are one word");
  const int lane = threadIdx.x % 4;
  uint4 bytes[2][kLoads];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      // Where a row's chunks end early, the lanes that have none read their first one again.
      const int chunk = lane + 4 * i < kChunks ? lane + 4 * i : lane;
      bytes[half][i] = *reinterpret_cast<const uint4*>(g_row[half] + 16 * chunk);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t own = bits_of_bytes(bytes[half][0]);
    if constexpr (kLoads == 2) own |= bits_of_bytes(bytes[half][1]) << 16;
#pragma unroll
    for (int from = 0; from < 4; ++from) {
      const uint32_t bits =
          __shfl_sync(0xffffffffu, own, from, 4) >> 2 * lane;  // this lane's keys at bits 0, 1, 8, 9 of a chunk
#pragma unroll
      for (int chunk = from; chunk < kChunks; chunk += 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t bit = 1u << (chunk / 4 * 16 + i / 2 * 8 + i % 2);
          if ((bits & bit) == 0) x[chunk * 8 + i / 2 * 4 + 2 * half + i % 2] = negative_infinity(0.0f);
        }
      }
    }
  }
}

// Two adjacent elements of a half type in one register.
__device__ __forceinline__ float2 unpack_pair(uint32_t pair, const __half*) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}
__device__ __forceinline__ float2 unpack_pair(uint32_t pair, const __nv_bfloat16*) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// x[i], x[i + 1] -> their scores.
template <int kCount>
__device__ __forceinline__ void add_bias(float (&x)[kCount], int i, float scale, float2 pair) {
  x[i] = fma(x[i], scale, pair.x);
  x[i + 1] = fma(x[i + 1], scale, pair.y);
}

// What a lane reads of a row of a half type: of a fragment of kCount / 4 chunks of 8 keys every fourth one.
template <int kCount>
struct BiasChunks {
  static constexpr int kChunks = kCount / 4, kLoads = (kChunks + 3) / 4;
  uint4 pairs[kLoads];

  // keys: that the row has from the fragment's first one on. Lanes that have no chunk read the last whole one.
  template <class T>
  __device__ __forceinline__ void load(const T* g_row, int keys = 8 * kChunks) {
    const int last = min(keys, 8 * kChunks) / 8 * 8 - 8;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      pairs[i] = *reinterpret_cast<const uint4*>(g_row + min(static_cast<int>(threadIdx.x % 4 + 4 * i) * 8, last));
    }
  }

  // x: products, in; scores of a row of the fragment, out.
  template <class T>
  __device__ __forceinline__ void add_to(float (&x)[kCount], float scale, int half, const T* type) const {
    const int lane = threadIdx.x % 4;
    const bool odd = lane % 2 != 0, upper = lane >= 2;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      // A transposition among the four lanes: lane l has the four pairs of chunk l, and gets pair l of all four chunks.
      uint32_t word[4] = {pairs[i].x, pairs[i].y, pairs[i].z, pairs[i].w};
#pragma unroll
      for (int w = 0; w < 4; w += 2) {
        const uint32_t theirs = __shfl_xor_sync(0xffffffffu, odd ? word[w] : word[w + 1], 1);
        (odd ? word[w] : word[w + 1]) = theirs;
      }
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        const uint32_t theirs = __shfl_xor_sync(0xffffffffu, upper ? word[w] : word[w + 2], 2);
        (upper ? word[w] : word[w + 2]) = theirs;
      }
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        if (4 * i + w >= kChunks) continue;
        add_bias(x, (4 * i + w) * 4 + 2 * half, scale, unpack_pair(word[w], type));
      }
    }
  }
};

template <class T, int kCount>
__device__ __forceinline__ void mask_rows(float (&x)[kCount], float scale, const T* const (&g_row)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    BiasChunks<kCount> bias;
    bias.load(g_row[half]);
    bias.add_to(x, scale, half, g_row[half]);
  }
}

template <int kCount>
__device__ __forceinline__ void mask_rows(float (&x)[kCount], float scale, const float* const (&g_row)[2]) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 2 * half; i < kCount; i += 4) {
      if (i % 32 < 4) keep_order();  // eight loads in flight; the compiler would take registers for all
      add_bias(x, i, scale, *reinterpret_cast<const float2*>(g_row[half] + i / 4 * 8 + 2 * lane));
    }
  }
}

// Scales and masks a fragment from `key` on. mask_row(half): offset of the mask's row for one of the thread's two rows.
template <class T, int kCount, class MaskRow>
__device__ __forceinline__ void scale_and_mask(float (&x)[kCount], float scale, const MatrixView& mask, MaskType mask_type,
                                               MaskRow mask_row, int key, int keys) {
  if (!adds(mask_type)) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] *= scale;
  }
  const int first = key - threadIdx.x % 4 * 2;  // of the fragment
  visit_mask<T>(mask, mask_type, [&](auto* g_mask) {
    if (mask.vector && first + 2 * kCount <= keys) {
      mask_rows(x, scale, {g_mask + first + mask_row(0), g_mask + first + mask_row(1)});
      return;
    }
    g_mask += key * mask.col_stride;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      auto* g_key = g_mask + mask_row(half);
#pragma unroll
      for (int i = 2 * half; i < kCount; i += 4) {
        if (i % 16 < 4) keep_order();  // eight loads in flight; the compiler would take registers for all
        float pair[2] = {x[i], x[i + 1]};
        apply_mask(pair, scale, g_key, mask.col_stride, key + i / 4 * 8, keys);
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
  const int seen = end - key;  // from the thread's first key on: what is compared with it are constants
#pragma unroll
  for (int i = 2 * half; i < kCount; i += 4) {
    if (i / 4 * 8 >= seen) x[i] = negative_infinity(0.0f);
    if (i / 4 * 8 + 1 >= seen) x[i + 1] = negative_infinity(0.0f);
  }
}

}  // namespace attention_ext
