// Masks and dropout as the column kernel sees them: a thread's scores are pairs of adjacent queries, 8 apart, of two keys, 8 apart:
// x[4 i + e] is query 8 i + e % 2 of the thread's, key 8 (e / 2).
#pragma once

#include <type_traits>

#include "attention/sm90/rows_backward/column_tile.cuh"
#include "attention/visibility/dropout.cuh"
#include "attention/visibility/score_modifier.cuh"
#include "device/sm90/warpgroup.cuh"

namespace attention_ext {

// -inf where a mask of bytes hides a key: a lane reads the warp's 16 keys of a query at once. g_key: the warp's first key of query
// 0 in the mask, whose rows are on 16-byte boundaries; query: the block's first one. Queries that do not exist have the row of the
// `last` one.
template <int kScores>
__device__ __forceinline__ void mask_columns(float (&x)[kScores], const uint8_t* g_key, int64_t row_stride, int query,
                                             int last) {
  const int lane = threadIdx.x % 32;
  static_assert(kScores % 16 == 0, "32 queries at a time");
#pragma unroll
  for (int part = 0; part < kScores / 16; ++part) {
    const uint8_t* g_row = g_key + min(query + part * 32 + lane, last) * row_stride;
    const uint32_t own = bits_of_bytes(*reinterpret_cast<const uint4*>(g_row));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const uint32_t bits = __shfl_sync(0xffffffffu, own, 8 * i + lane % 4 * 2 + e) >> lane / 4;
        if ((bits & 1) == 0) x[part * 16 + 4 * i + e] = negative_infinity(0.0f);
        if ((bits & 0x100) == 0) x[part * 16 + 4 * i + 2 + e] = negative_infinity(0.0f);
      }
    }
  }
}

// The same of any mask, or its sum: g_key: the thread's first key of query 0; `seen` keys exist from there on; query: the thread's
// first one.
template <class Stored, int kScores>
__device__ __forceinline__ void mask_columns(float (&x)[kScores], const Stored* g_key, const MatrixView& mask, int query,
                                             int last, int seen) {
#pragma unroll
  for (int i = 0; i < kScores / 4; ++i) {
    if (i % 2 == 0) keep_order();  // eight loads in flight; the compiler would take registers for all
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const Stored* g_query = g_key + min(query + 8 * i + e, last) * mask.row_stride;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (8 * half >= seen) continue;
        float& score = x[4 * i + 2 * half + e];
        const Stored stored = g_query[8 * half * mask.col_stride];
        if constexpr (std::is_same_v<Stored, uint8_t>) {
          if (!mask_shows(stored)) score = negative_infinity(0.0f);
        } else {
          score += static_cast<float>(to_accumulator(stored));
        }
      }
    }
  }
}

// column_weights under a mask: the difference of score and log-sum-exp first. marked: StageMark.
template <class Tile, int kScores>
__device__ __forceinline__ void column_weights_general(float (&scores)[kScores], const RowsBackwardParams& p,
                                                       const QueryRecord* records, const typename Tile::Work& work,
                                                       int first_row, int marked) {
  const int lane = threadIdx.x % 32, col = lane % 4 * 2;
  const int warp_key = work.key + first_row + threadIdx.x / 32 % 4 * 16, key = warp_key + lane / 4;
#pragma unroll
  for (int i = 0; i < kScores; ++i) scores[i] = __fmul_rn(scores[i], p.scale_factor);
  const int query = records[0].query, last = static_cast<int>(p.L) - 1;
  visit_mask<typename Tile::T>(p.mask, marked & kShownWhole ? MaskType::kNone : p.mask_type, [&](auto* g_mask) {
    g_mask += records[0].mask;
    using Stored = std::remove_cv_t<std::remove_pointer_t<decltype(g_mask)>>;
    if constexpr (std::is_same_v<Stored, uint8_t>) {
      if (p.mask.vector && warp_key + 16 <= work.keys) {
        mask_columns(scores, g_mask + warp_key, p.mask.row_stride, query, last);
        return;
      }
    }
    mask_columns(scores, g_mask + key * p.mask.col_stride, p.mask, query + col, last, work.keys - key);
  });
  const int from_key = p.sequence.causal ? query + col - key : 8;
#pragma unroll
  for (int i = 0; i < kScores / 4; ++i) {
    const float2 offset = query_pair(records, &QueryRecord::offset, i), lse = query_pair(records, &QueryRecord::lse, i);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float weight = Exponents<typename Tile::T>::weight_of_score(scores[4 * i + e], e % 2 == 0 ? lse.x : lse.y,
                                                                        e % 2 == 0 ? offset.x : offset.y);
      scores[4 * i + e] = 8 * i + e % 2 + from_key < e / 2 * 8 ? 0.0f : weight;
    }
  }
}

// The one of these that a block needs. careful: column_careful, which is true under a mask.
template <class Tile, int kScores>
__device__ __forceinline__ void make_column_weights(float (&scores)[kScores], const RowsBackwardParams& p,
                                                    const QueryRecord* records, const typename Tile::Work& work, int first_row,
                                                    bool careful, int marked) {
  if (Tile::kGeneral && p.mask_type != MaskType::kNone) {
    column_weights_general<Tile>(scores, p, records, work, first_row, marked);
  } else if (careful) {
    column_weights<Tile, true>(scores, p, records, work, first_row);
  } else {
    column_weights<Tile, false>(scores, p, records, work, first_row);
  }
}

// Gives the weights that dropout drops the sign, by which column_score_grads and pack know them. first_row: as above.
template <class Tile, int kScores>
__device__ __forceinline__ void mark_dropped_columns(float (&weights)[kScores], const RowsBackwardParams& p,
                                                     const QueryRecord* records, const typename Tile::Work& work,
                                                     int first_row) {
  const int warp_key = work.key + first_row + static_cast<int>(threadIdx.x / 32 % 4) * 16;
  visit_kept_columns<kScores>(p.dropout, records[0].n, records[0].query, warp_key, [&](int i, bool kept) {
    if (!kept) weights[i] = -weights[i];
  });
}

}  // namespace attention_ext
