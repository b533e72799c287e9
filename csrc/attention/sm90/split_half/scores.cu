// Stage 1 of float32 attention by half terms (Hopper): weights of one slice, 2^(score * log2(e) - reference of its segment of 64
// keys), as two half terms each, with the segments' references and sums.
//
// Product of block tiles of 128 queries by 128 keys, gemm/sm90/mainloop.cuh, three products of terms for each. A warpgroup's 64
// rows have one exponent, a segment's keys another: both are a factor of the scale. A reference is the segment's largest exponent,
// rounded up, so that to change it is exact; weights are stored times 2^15, where their low term is no subnormal.
// The backward has the weights as floats, and the same product of grad_out and value for their gradients.
// Grid: persistent CTAs, one an SM; 384 threads. Shared memory: SplitHalfWgmmaTile::Shared. Registers: 232 a consumer thread.
#include "attention/sm90/split_half/segment_weights.cuh"
#include "attention/sm90/split_half/terms_map.h"
#include "attention/visibility/dropout.cuh"
#include "attention/visibility/score_place.cuh"
#include "core/arithmetic.h"
#include "gemm/sm90/mainloop.cuh"
#include "gemm/split_half/epilogue.cuh"

namespace attention_ext {
namespace {

// kMasked: there is a mask.
template <class Tile, ScoreProducts kAs, bool kMasked>
struct SplitHalfScores {
  static constexpr int kSegments = Tile::kN / kSegment;
  static_assert(kSegment == kSplitHalfBlock, "a segment's keys have one exponent");

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

  __device__ __forceinline__ ScoreTiles<Tile, false> score_tiles() const { return {p.slice, p.sequence.causal}; }
  __device__ __forceinline__ int64_t tiles() const { return p.slice.batch_count * score_tiles().of_matrix(); }

  __device__ __forceinline__ Place aim(int64_t tile) const {
    Place at;
    static_cast<ScorePlace&>(at) = score_place<Tile>(p.slice, p.sequence, score_tiles().at(static_cast<unsigned>(tile)));
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
    fetched.query_exponent = row / kSplitHalfBlock * kSplitHalfBlock < at.rows
                                 ? p.query_exponents[at.slice_index * row_blocks + (at.slice_row + row) / kSplitHalfBlock]
                                 : kRowOfZeros;
#pragma unroll
    for (int segment = 0; segment < kSegments; ++segment) {
      fetched.key_exponents[segment] = segment * kSegment < at.cols
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
    if constexpr (kAs == ScoreProducts::kWeightGrads) {
      store_weight_grads(at, row, fetched, product);
      return;
    }
    const int lane = threadIdx.x % 32, warp_row = row - lane / 4;
    const bool terms = kAs == ScoreProducts::kWeightTerms;
    const int64_t segments = terms ? (p.slice.col_count + kSegment - 1) / kSegment : p.pitch / kSegment,
                  rows = p.slice.row_count;
    SplitHalfSegment* g_segment =
        p.segments + (at.slice_index * segments + (terms ? at.slice_col : at.col) / kSegment) * rows + at.slice_row + row;
    SegmentPlace place = {at.n, fetched.mask, at.range, at.row + row, at.row + at.rows, 0, at.col};
    place.open = open_keys(place.range, place.row, place.end_row);
    bool too_large = false;
#pragma unroll
    for (int segment = 0; segment < kSegments; ++segment) {
      if (segment * kSegment >= at.cols) break;
      float x[kSegment / 2];
#pragma unroll
      for (int i = 0; i < kSegment / 2; ++i) x[i] = product[segment * (kSegment / 2) + i];
      SplitHalfSegment of_rows[2];
      constexpr int kShift = kAs == ScoreProducts::kWeightTerms ? 15 : 0;
      if (make_segment_weights<kMasked, kShift>(x, p, place, fetched.query_exponent + fetched.key_exponents[segment],
                                                of_rows)) {
        too_large = true;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (lane % 4 == 0 && row + 8 * half < at.rows) g_segment[segment * rows + 8 * half] = of_rows[half];
      }
      if constexpr (kAs == ScoreProducts::kWeightTerms) {
        store_terms(at, warp_row, segment, x, s_strip);
      } else {
        store_floats(at, row, segment, x);
      }
      place.key += kSegment;
    }
    if (too_large) p.marks[terms ? at.n * ceil_div(p.L, kExactRows) + (at.row + warp_row) / kExactRows : at.n] = 1;
  }

  // What the gradients of the weights are before the softmax's: products, of those that dropout keeps. And what delta is made of,
  // while they are here.
  __device__ __forceinline__ void store_weight_grads(const Place& at, int row, const Fetched& fetched,
                                                     const float (&product)[Tile::kN / 2]) const {
    const float factor = static_cast<float>(p.factor);
    uint32_t largest = 0;
#pragma unroll
    for (int segment = 0; segment < kSegments; ++segment) {
      if (segment * kSegment >= at.cols) break;
      const int exponent = fetched.query_exponent + fetched.key_exponents[segment];
      float x[kSegment / 2];
#pragma unroll
      for (int i = 0; i < kSegment / 2; ++i) {
        x[i] = times_power_of_two(product[segment * (kSegment / 2) + i] * factor, exponent);
      }
      if (p.dropout.seed != nullptr) {
        visit_kept<kSegment / 2>(p.dropout, at.n, at.row + row, at.col + segment * kSegment, [&](int i, bool kept) {
          if (!kept) x[i] = 0.0f;
        });
      }
      store_floats(at, row, segment, x);
      largest = max(largest, store_deltas(at, row, segment, x));
    }
    largest = __reduce_max_sync(0xffffffffu, largest);
    if (threadIdx.x % 32 == 0 && largest > p.largest_grads[at.n]) atomicMax(&p.largest_grads[at.n], largest);
  }

  // Of gradients of a segment's weights. Returns the largest whose weight is not 0, its bits.
  __device__ __forceinline__ uint32_t store_deltas(const Place& at, int row, int segment,
                                                   const float (&x)[kSegment / 2]) const {
    uint32_t largest = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float delta = 0.0f;
      const int64_t rows = p.slice.row_count, slice_row = at.slice_row + row + 8 * half;
      const int64_t place = (at.slice_index * (p.pitch / kSegment) + at.col / kSegment + segment) * rows + slice_row;
      const bool exists = row + 8 * half < at.rows;
      if (exists) {
        // A row that sees one key has the very gradient for delta.
        const bool single = p.segments[place].sum < 0.0f;
        const float* g_weights = p.weights_of_grads + (at.slice_index * rows + slice_row) * p.pitch + at.col +
                                 segment * kSegment + threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < kSegment / 8; ++i) {
          const float2 pair = *reinterpret_cast<const float2*>(g_weights + i * 8);
          const float weight[2] = {pair.x, pair.y};
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float grad = x[4 * i + 2 * half + e];
            if (weight[e] == 0.0f) continue;
            delta = single ? grad : fmaf(weight[e], grad, delta);
            largest = max(largest, __float_as_uint(grad) & 0x7fffffffu);
          }
        }
      }
      delta = warp_sum<4>(delta);
      if (exists && threadIdx.x % 4 == 0) p.deltas[place] = delta;
    }
    return largest;
  }

  // Of a segment, whose floats all exist: the pitch is whole segments.
  __device__ __forceinline__ void store_floats(const Place& at, int row, int segment, const float (&x)[kSegment / 2]) const {
    float* g_out = static_cast<float*>(p.weights) + (at.slice_index * p.slice.row_count + at.slice_row + row) * p.pitch +
                   at.col + segment * kSegment + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kSegment / 2; i += 2) {
      const int half = i / 2 % 2;
      if (row + 8 * half < at.rows) {
        *reinterpret_cast<float2*>(g_out + 8 * half * p.pitch + i / 4 * 8) = make_float2(x[i], x[i + 1]);
      }
    }
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
      take_term(x, pairs);
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
struct SplitHalfScoresWork : SplitHalfScores<Tile, ScoreProducts::kWeightTerms, false> {};
template <class Tile>
struct MaskedSplitHalfScoresWork : SplitHalfScores<Tile, ScoreProducts::kWeightTerms, true> {};
template <class Tile>
struct SplitHalfWeightsWork : SplitHalfScores<Tile, ScoreProducts::kWeights, false> {};
template <class Tile>
struct MaskedSplitHalfWeightsWork : SplitHalfScores<Tile, ScoreProducts::kWeights, true> {};
template <class Tile>
struct SplitHalfWeightGradsWork : SplitHalfScores<Tile, ScoreProducts::kWeightGrads, false> {};

using ScoresTile = SplitHalfWgmmaTile<false, kSplitHalfPromoted>;

template <template <class> class Work>
cudaError_t launch(const SplitHalfScoresParams& params, const WgmmaMaps& maps, cudaStream_t stream) {
  const int64_t of_matrix = ScoreTiles<ScoresTile, false>(params.slice, params.sequence.causal).of_matrix();
  return launch_wgmma_tiles<Work, ScoresTile>(params, maps, params.slice.batch_count * of_matrix, stream);
}

}  // namespace

cudaError_t launch_split_half_scores(const SplitHalfScoresParams& params, ScoreProducts as, void* query_terms, void* key_terms,
                                     cudaStream_t stream) {
  const Slice& slice = params.slice;
  WgmmaMaps maps;
  cudaError_t status = make_terms_map(maps.a, query_terms, slice.batch_count, slice.row_count, params.E, ScoresTile::kM);
  if (status == cudaSuccess) {
    status = make_terms_map(maps.b, key_terms, matrices_of_slice(slice, params.key_group), slice.col_count, params.E,
                            ScoresTile::kN);
  }
  if (status != cudaSuccess) return status;
  const bool masked = params.mask_type != MaskType::kNone;
  switch (as) {
    case ScoreProducts::kWeightTerms:
      return masked ? launch<MaskedSplitHalfScoresWork>(params, maps, stream)
                    : launch<SplitHalfScoresWork>(params, maps, stream);
    case ScoreProducts::kWeights:
      return masked ? launch<MaskedSplitHalfWeightsWork>(params, maps, stream)
                    : launch<SplitHalfWeightsWork>(params, maps, stream);
    case ScoreProducts::kWeightGrads: return launch<SplitHalfWeightGradsWork>(params, maps, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace attention_ext
