// Dropout: which weights stay. Sixteen random bits decide about a weight, and a call of Philox about a set of eight.
//
// A set is what a thread has of 16 queries by 16 keys as wgmma leaves them with queries as rows: queries q and q + 8 by keys k, k +
// 1, k + 8 and k + 9, k even. Such a thread draws for itself, and shares with none. With keys as rows two lanes have two sets
// between them, and exchange halves. Sets are counted from query 0 and key 0 of a matrix (batch row and query head), and the
// counter is the set's place, so every kernel drops the same weights whatever its tiles. Of a set's four words number 2 * (k / 8 %
// 2) + q / 8 % 2 is of query q and keys k and k + 1: the lower half of the even key, the upper half of the odd one.
#pragma once

#include "core/slice.h"
#include "device/common/random.cuh"

namespace attention_ext {

// The set of a query and a key of matrix n. seed: *dropout.seed.
__device__ __forceinline__ RandomWords draw_set(int64_t seed, int64_t n, int query, int key) {
  const uint64_t of_key = static_cast<uint64_t>(seed), of_matrix = static_cast<uint64_t>(n);
  const uint32_t q = static_cast<uint32_t>(query), k = static_cast<uint32_t>(key);
  return philox(make_uint2(static_cast<uint32_t>(of_key), static_cast<uint32_t>(of_key >> 32)),
                make_uint4(k / 16 * 4 + k % 8 / 2, q / 16 * 8 + q % 8, static_cast<uint32_t>(of_matrix),
                           static_cast<uint32_t>(of_matrix >> 32)));
}

// What a word says of its even key, and of its odd one.
__device__ __forceinline__ bool keeps_low(const Dropout& dropout, uint32_t word) { return word << 16 > dropout.dropped_up_to; }
__device__ __forceinline__ bool keeps_high(const Dropout& dropout, uint32_t word) { return word > dropout.dropped_up_to; }

// The word of a query and of keys `pair` times 8 after the set's first ones.
__device__ __forceinline__ uint32_t word_of(const RandomWords& random, int query, int pair) {
  return query / 8 % 2 == 0 ? random.word[2 * pair] : random.word[2 * pair + 1];
}
// The word of a query and a key.
__device__ __forceinline__ uint32_t draw_word(int64_t seed, int64_t n, int query, int key) {
  const RandomWords random = draw_set(seed, n, query, key);
  return key / 8 % 2 == 0 ? word_of(random, query, 0) : word_of(random, query, 1);
}

// Whether one weight stays.
__device__ __forceinline__ bool keeps(const Dropout& dropout, int64_t seed, int64_t n, int query, int key) {
  const uint32_t word = draw_word(seed, n, query, key);
  return key % 2 == 0 ? keeps_low(dropout, word) : keeps_high(dropout, word);
}

// Sets to zero what dropout drops of the four weights (n, query, key .. key + 3); key is a multiple of 4.
template <class A>
__device__ __forceinline__ void drop_quad(A (&weights)[4], const Dropout& dropout, int64_t seed, int64_t n, int query,
                                          int key) {
#pragma unroll
  for (int e = 0; e < 4; e += 2) {
    const uint32_t word = draw_word(seed, n, query, key + e);
    if (!keeps_low(dropout, word)) weights[e] = 0;
    if (!keeps_high(dropout, word)) weights[e + 1] = 0;
  }
}

// visit(i, kept) for each x[i] of a fragment of kCount elements with queries as rows (score_modifier.cuh). query: of this thread's
// first row, among the first eight of 16; the other one is 8 further. key: the fragment's first, a multiple of 16.
template <int kCount, class Visit>
__device__ __forceinline__ void visit_kept(const Dropout& dropout, int64_t n, int query, int key, Visit visit) {
  static_assert(kCount % 8 == 0, "whole sets");
  const int64_t seed = *dropout.seed;
#pragma unroll
  for (int i = 0; i < kCount; i += 8) {
    const RandomWords random = draw_set(seed, n, query, key + 2 * i + static_cast<int>(threadIdx.x % 4 * 2));
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      visit(i + 2 * word, keeps_low(dropout, random.word[word]));
      visit(i + 2 * word + 1, keeps_high(dropout, random.word[word]));
    }
  }
}

// The same for a thread's row number `half`, wherever it lies: half of each set is drawn in vain.
template <int kCount, class Visit>
__device__ __forceinline__ void visit_kept_of_row(int half, const Dropout& dropout, int64_t n, int query, int key,
                                                  Visit visit) {
  const int64_t seed = *dropout.seed;
#pragma unroll
  for (int i = 0; i < kCount; i += 8) {
    const RandomWords random = draw_set(seed, n, query, key + 2 * i + static_cast<int>(threadIdx.x % 4 * 2));
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const uint32_t word = word_of(random, query, pair);
      visit(i + 4 * pair + 2 * half, keeps_low(dropout, word));
      visit(i + 4 * pair + 2 * half + 1, keeps_high(dropout, word));
    }
  }
}

// The same of a tile whose rows are queries of one head, or of a group's heads in turn. row: of this thread's first one in it.
template <int kCount, class Work, class Visit>
__device__ __forceinline__ void visit_kept_of_tile(const Dropout& dropout, const Work& work, int row, int key, Visit visit) {
  if (work.group == 1) {
    visit_kept<kCount>(dropout, work.head_of(row), work.query_of(row), key, visit);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int of = row + 8 * half;
      visit_kept_of_row<kCount>(half, dropout, work.head_of(of), work.query_of(of), key, visit);
    }
  }
}

// The same of a fragment with keys as rows (column_general.cuh). query: the fragment's first; warp_key: the warp's first; both
// multiples of 16. Of queries 2 l and 2 l + 1 the lane with the even key draws the one set and the lane with the odd key, four
// lanes further, the other one. All lanes of the warp.
template <int kCount, class Visit>
__device__ __forceinline__ void visit_kept_columns(const Dropout& dropout, int64_t n, int query, int warp_key, Visit visit) {
  static_assert(kCount % 8 == 0, "whole sets");
  const int64_t seed = *dropout.seed;
  const int lane = threadIdx.x % 32, odd = lane / 4 % 2;
  const uint32_t own = odd ? 0x7632u : 0x5410u,
                 other = own ^ 0x2222u;  // halves of two words: of this lane's key, of the other's
#pragma unroll
  for (int i = 0; i < kCount; i += 8) {
    const RandomWords random = draw_set(seed, n, query + 2 * i + lane % 4 * 2 + odd, warp_key + lane / 8 * 2);
#pragma unroll
    for (int key = 0; key < 2; ++key) {                                                // this lane's two, 8 apart
      const uint32_t first = random.word[2 * key], second = random.word[2 * key + 1];  // of queries 8 apart
      const uint32_t drawn = __byte_perm(first, second, own);
      const uint32_t theirs = __shfl_xor_sync(0xffffffffu, __byte_perm(first, second, other), 4);
      const uint32_t of_even = odd ? theirs : drawn, of_odd = odd ? drawn : theirs;  // of the even query, of the odd one
      visit(i + 2 * key, keeps_low(dropout, of_even));
      visit(i + 2 * key + 1, keeps_low(dropout, of_odd));
      visit(i + 2 * key + 4, keeps_high(dropout, of_even));
      visit(i + 2 * key + 5, keeps_high(dropout, of_odd));
    }
  }
}

}  // namespace attention_ext
