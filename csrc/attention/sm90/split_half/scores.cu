// Stage 1 of float32 attention by half terms (Hopper): weights of one slice, 2^(score * log2(e) - reference of its segment of 64 keys),
// as two half terms each, with the segments' references and sums.
//
// Product of block tiles of 128 queries by 128 keys, gemm/sm90/mainloop.cuh, three products of terms for each. A warpgroup's 64 rows
// have one exponent, a segment's keys another: both are a factor of the scale. A reference is the segment's largest exponent,
// rounded up, so that to change it is exact; weights are stored times 2^15, where their low term is no subnormal.
// Grid: persistent CTAs, one an SM; 384 threads. Shared memory: SplitHalfWgmmaTile::Shared. Registers: 232 a consumer thread.
#include "attention/sm90/split_half/split_half.h"
#include "attention/sm90/split_half/terms_map.h"
#include "attention/visibility/score_modifier.cuh"
#include "attention/visibility/score_place.cuh"
#include "core/arithmetic.h"
#include "device/common/random.cuh"
#include "gemm/sm90/mainloop.cuh"

namespace attention_ext {
namespace {

// kMasked: there is a mask.
template <class Tile, bool kMasked>
struct SplitHalfScores {
  static constexpr int kSegments = Tile::kN / kSegment;
  static_assert(kSegment == kSplitHalfBlock, "a segment's keys have one exponent");
  static constexpr int kMostExponent = 90;             // products are up to 2^40
  static constexpr float kLeastFactor = 0x1p-100f;     // far from where a factor and -inf would make NaN

  const SplitHalfScoresParams& p;

  struct Place : ScorePlace {
    int steps;
    int64_t key_matrix;  // of the slice
    TensorPosition a, b;
  };
  struct Fetched {
    int query_exponent;
    int key_exponents[kSegments];
    int64_t mask;  // offset of the matrix
  };

  __device__ __forceinline__ int m_tiles() const { return static_cast<int>((p.slice.row_count + Tile::kM - 1) / Tile::kM); }
  __device__ __forceinline__ int n_tiles() const { return static_cast<int>((p.slice.col_count + Tile::kN - 1) / Tile::kN); }
  __device__ __forceinline__ int64_t tiles() const { return p.slice.batch_count * m_tiles() * n_tiles(); }

  __device__ __forceinline__ Place aim(int64_t tile) const {
    Place at;
    static_cast<ScorePlace&>(at) =
        score_place<Tile>(p.slice, p.sequence, tile_of(static_cast<unsigned>(tile), m_tiles(), n_tiles(), 0));
    at.steps = at.hidden ? 0 : static_cast<int>((p.E + Tile::kK - 1) / Tile::kK);
    at.key_matrix = matrix_of_slice(at.n, p.slice, p.key_group);
    at.a = {{0, at.slice_row, 0, static_cast<int>(at.slice_index), 0}};
    at.b = {{0, at.slice_col, 0, static_cast<int>(at.key_matrix), 0}};
    return at;
  }
  __device__ __forceinline__ Fetched fetch(const Place& at, int row) const {
    const int64_t row_blocks = (p.slice.row_count + kSplitHalfBlock - 1) / kSplitHalfBlock,
                  key_blocks = (p.slice.col_count + kSplitHalfBlock - 1) / kSplitHalfBlock;
    Fetched fetched;
    fetched.query_exponent =
        row / kSplitHalfBlock * kSplitHalfBlock < at.rows
            ? p.query_exponents[at.slice_index * row_blocks + (at.slice_row + row) / kSplitHalfBlock]
            : kRowOfZeros;
#pragma unroll
    for (int segment = 0; segment < kSegments; ++segment) {
      fetched.key_exponents[segment] =
          segment * kSegment < at.cols
              ? p.key_exponents[at.key_matrix * key_blocks + at.slice_col / kSegment + segment]
              : kRowOfZeros;
    }
    fetched.mask = kMasked ? batch_offset(p.batch, p.mask, at.n, at.slice_index) : 0;
    return fetched;
  }
  __device__ __forceinline__ PlainPromotion promotion(const Place&, int, const Fetched&, float (&product)[Tile::kN / 2]) const {
    return PlainPromotion(product);
  }

  __device__ __forceinline__ void store(const Place& at, int row, const Fetched& fetched, float (&product)[Tile::kN / 2],
                                        uint32_t s_strip, PlainPromotion) const {
    const int lane = threadIdx.x % 32, warp_row = row - lane / 4;
    const int end = at.range.keys;
    const int open = warp_row + 16 <= at.rows ? at.range.end_of_row(at.row + warp_row) : 0;  // all of the warp's rows see these
    const int64_t segments = (p.slice.col_count + kSegment - 1) / kSegment, rows = p.slice.row_count;
    SplitHalfSegment* g_segment =
        p.segments + (at.slice_index * segments + at.slice_col / kSegment) * rows + at.slice_row + row;
    const auto mask_row = [&](int half) {  // of the last row for rows that do not exist
      return fetched.mask + (at.row + min(row + 8 * half, at.rows - 1)) * p.mask.row_stride;
    };
    bool too_large = false;
#pragma unroll
    for (int segment = 0; segment < kSegments; ++segment) {
      if (segment * kSegment >= at.cols) break;
      // A score is the product times `factor`: 0 where either side is zeros.
      const int exponent = fetched.query_exponent + fetched.key_exponents[segment];
      const float power = exponent < -126 ? 0.0f : __int_as_float((min(exponent, 127) + 127) << 23);
      const float factor = static_cast<float>(p.scale) * power;
      too_large = too_large || exponent > kMostExponent;
      // Products will do for scores until the exponential where the factor can wait for it.
      const bool products = !kMasked && factor > kLeastFactor;
      const float before = products ? 1.0f : factor, unit = (products ? factor : 1.0f) * kLog2E;
      const int first_key = at.col + segment * kSegment, key = first_key + lane % 4 * 2;
      float x[kSegment / 2];
#pragma unroll
      for (int i = 0; i < kSegment / 2; ++i) x[i] = product[segment * (kSegment / 2) + i];
      scale_and_mask<float>(x, before, p.mask, kMasked ? p.mask_type : MaskType::kNone, mask_row, key, end);
      if (first_key + kSegment > open) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          hide_keys(x, half, key, row + 8 * half < at.rows ? at.range.end_of_row(at.row + row + 8 * half) : 0);
        }
      }
      float reference[2], sum[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = negative_infinity(0.0f);
#pragma unroll
        for (int i = 2 * half; i < kSegment / 2; i += 4) largest = maximum(largest, maximum(x[i], x[i + 1]));
        largest = warp_max<4>(largest);
        reference[half] = ceilf(largest * unit);
        const bool none = largest == negative_infinity(0.0f), below = !none && reference[half] < kFarBelow;
        too_large = too_large || (reference[half] > kFarAbove && reference[half] < __int_as_float(0x7f800000));
        // Weights of keys that are far below are 0, unless the row sees no others.
        const float offset = none || below ? 0.0f : 15.0f - reference[half];
        sum[half] = 0.0f;
#pragma unroll
        for (int i = 2 * half; i < kSegment / 2; i += 4) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            x[i + e] = below ? 0.0f : exp2_approx(fmaf(x[i + e], unit, offset));
            sum[half] += x[i + e];
          }
        }
        sum[half] = warp_sum<4>(sum[half]) * 0x1p-15f;
        if (below) reference[half] = kFarBelow;
        if (!(sum[half] == sum[half])) reference[half] = 0.0f;  // so that it takes part
        if (lane % 4 == 0 && row + 8 * half < at.rows) g_segment[segment * rows + 8 * half] = {reference[half], sum[half]};
      }
      if (p.dropout.seed != nullptr) {
        const int64_t seed = *p.dropout.seed;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          drop_fragment(x, half, p.dropout, seed, at.n, at.row + row + 8 * half, first_key / 4);
        }
      }
      store_terms(at, warp_row, segment, x, s_strip);
    }
    if (too_large) p.facts[at.n].exact = 1;
  }

  // A segment's weights, the high terms and then the low ones.
  __device__ __forceinline__ void store_terms(const Place& at, int warp_row, int segment, float (&x)[kSegment / 2],
                                              uint32_t s_strip) const {
    const int lane = threadIdx.x % 32;
    const int64_t pitch = slice_pitch(p.slice.col_count), rows = p.slice.row_count;
    __half* g_out = static_cast<__half*>(p.weights) + (at.slice_index * rows + at.slice_row + warp_row + lane / 8) * pitch +
                    at.slice_col + segment * kSegment + lane % 8 * 8;
#pragma unroll
    for (int term = 0; term < 2; ++term) {
      uint32_t pairs[kSegment / 4];
#pragma unroll
      for (int i = 0; i < kSegment / 4; ++i) {
        pairs[i] = pack_pair<__half>(x[2 * i], x[2 * i + 1]);
        const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&pairs[i]));
        x[2 * i] -= high.x;
        x[2 * i + 1] -= high.y;
      }
      for_each_chunk<__half, 4>(pairs, s_strip, [&](int chunk_row, int chunk_col, const __half* chunk) {
        // A chunk that begins at an existing key may end after the last one, still inside the row's pitch: zeros.
        if (warp_row + chunk_row < at.rows && segment * kSegment + chunk_col < at.cols) {
          *reinterpret_cast<uint4*>(g_out + (chunk_row - lane / 8) * pitch) = *reinterpret_cast<const uint4*>(chunk);
        }
      });
      g_out += p.slice.batch_count * rows * pitch;
    }
  }
};

template <class Tile>
struct SplitHalfScoresWork : SplitHalfScores<Tile, false> {};
template <class Tile>
struct MaskedSplitHalfScoresWork : SplitHalfScores<Tile, true> {};

using ScoresTile = SplitHalfWgmmaTile<false, kSplitHalfPromoted>;

}  // namespace

cudaError_t launch_split_half_scores(const SplitHalfScoresParams& params, void* query_terms, void* key_terms, cudaStream_t stream) {
  using Tile = ScoresTile;
  const Slice& slice = params.slice;
  WgmmaMaps maps;
  cudaError_t status = make_terms_map(maps.a, query_terms, slice.batch_count, slice.row_count, params.E, Tile::kM);
  if (status == cudaSuccess) {
    status = make_terms_map(maps.b, key_terms, matrices_of_slice(slice, params.key_group), slice.col_count, params.E, Tile::kN);
  }
  if (status != cudaSuccess) return status;
  const int64_t tiles = slice.batch_count * ceil_div(slice.row_count, Tile::kM) * ceil_div(slice.col_count, Tile::kN);
  return params.mask_type == MaskType::kNone ? launch_wgmma_tiles<SplitHalfScoresWork, Tile>(params, maps, tiles, stream)
                                             : launch_wgmma_tiles<MaskedSplitHalfScoresWork, Tile>(params, maps, tiles, stream);
}

}  // namespace attention_ext
