// Stage 1 of float32 attention by half terms (Hopper): weights of one slice, 2^(score * log2(e) - reference of its segment of 64
// keys), as two half terms each, with the segments' references and sums.
//
// Product of block tiles of 128 queries by 128 keys, gemm/sm90/mainloop.cuh, three products of terms for each. A warpgroup's 64
// rows have one exponent, a segment's keys another: both are a factor of the scale. A reference is the segment's largest exponent,
// rounded up, so that to change it is exact; weights are stored times 2^15, where their low term is no subnormal.
// Grid: persistent CTAs, one an SM; 384 threads. Shared memory: SplitHalfWgmmaTile::Shared. Registers: 232 a consumer thread.
#include "attention/sm90/split_half/segment_weights.cuh"
#include "attention/sm90/split_half/terms_map.h"
#include "attention/visibility/score_place.cuh"
#include "core/arithmetic.h"
#include "gemm/sm90/mainloop.cuh"

namespace attention_ext {
namespace {

// kMasked: there is a mask.
template <class Tile, bool kMasked>
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
    const int lane = threadIdx.x % 32, warp_row = row - lane / 4;
    const int64_t segments = (p.slice.col_count + kSegment - 1) / kSegment, rows = p.slice.row_count;
    SplitHalfSegment* g_segment =
        p.segments + (at.slice_index * segments + at.slice_col / kSegment) * rows + at.slice_row + row;
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
      if (make_segment_weights<kMasked>(x, p, place, fetched.query_exponent + fetched.key_exponents[segment], of_rows)) {
        too_large = true;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (lane % 4 == 0 && row + 8 * half < at.rows) g_segment[segment * rows + 8 * half] = of_rows[half];
      }
      store_terms(at, warp_row, segment, x, s_strip);
      place.key += kSegment;
    }
    if (too_large) p.marks[at.n * ceil_div(p.L, kExactRows) + (at.row + warp_row) / kExactRows] = 1;
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
struct SplitHalfScoresWork : SplitHalfScores<Tile, false> {};
template <class Tile>
struct MaskedSplitHalfScoresWork : SplitHalfScores<Tile, true> {};

using ScoresTile = SplitHalfWgmmaTile<false, kSplitHalfPromoted>;

}  // namespace

cudaError_t launch_split_half_scores(const SplitHalfScoresParams& params, void* query_terms, void* key_terms,
                                     cudaStream_t stream) {
  using Tile = ScoresTile;
  const Slice& slice = params.slice;
  WgmmaMaps maps;
  cudaError_t status = make_terms_map(maps.a, query_terms, slice.batch_count, slice.row_count, params.E, Tile::kM);
  if (status == cudaSuccess) {
    status = make_terms_map(maps.b, key_terms, matrices_of_slice(slice, params.key_group), slice.col_count, params.E, Tile::kN);
  }
  if (status != cudaSuccess) return status;
  const int64_t tiles = slice.batch_count * ScoreTiles<Tile, false>(slice, params.sequence.causal).of_matrix();
  return params.mask_type == MaskType::kNone ? launch_wgmma_tiles<SplitHalfScoresWork, Tile>(params, maps, tiles, stream)
                                             : launch_wgmma_tiles<MaskedSplitHalfScoresWork, Tile>(params, maps, tiles, stream);
}

}  // namespace attention_ext
