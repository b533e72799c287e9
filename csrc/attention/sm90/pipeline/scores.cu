// Stage 1 of the pipeline by wgmma (Hopper): exp(score - reference of its segment of 64 keys) in half precision with the
// segments' statistics, for one slice; what pipeline/qk_scores.cu does there for half types.
//
// Product of block tiles of 128 queries by 256 keys, gemm/sm90/mainloop.cuh. In the epilogue a segment lies in the registers of
// four lanes: maximum, exponentials, sums, two shuffles each, and the sum of what was rounded by a product with ones; then through
// shared memory to rows of 128 bytes.
// Grid: persistent CTAs, one an SM; 384 threads. Shared memory: WgmmaTile::Shared. Registers: 232 a consumer thread.
// Masks: read 16 bytes at a time (score_modifier.cuh), by an instance of their own.
#include "attention/sm90/pipeline/pipeline.h"
#include "attention/softmax/segment.cuh"
#include "attention/visibility/score_modifier.cuh"
#include "attention/visibility/score_place.cuh"
#include "core/arithmetic.h"
#include "core/dispatch.h"
#include "core/tensor_map.h"
#include "device/sm80/mma.cuh"
#include "gemm/sm90/mainloop.cuh"
#include "plan/slices.h"

namespace attention_ext {
namespace {

// kMasked: there is a mask.
template <class Tile, bool kMasked>
struct WgmmaScores {
  using T = typename Tile::T;
  static constexpr int kSegments = Tile::kN / kSegment;
  static constexpr int kPart = 128;  // keys whose mask is read at once: a wait for it is long, and registers hold no more

  const QkScoresParams& p;

  struct Place : ScorePlace {
    int steps;
    TensorPosition a, b;
  };
  struct Fetched {
    int64_t mask;  // offset of the matrix
  };

  __device__ __forceinline__ ScoreTiles<Tile, true> score_tiles() const { return {p.slice, p.sequence.causal}; }
  __device__ __forceinline__ int64_t tiles() const { return p.slice.batch_count * score_tiles().of_matrix(); }

  __device__ __forceinline__ Place aim(int64_t tile) const {
    Place at;
    static_cast<ScorePlace&>(at) = score_place<Tile>(p.slice, p.sequence, score_tiles().at(static_cast<unsigned>(tile)));
    at.steps = at.hidden ? 0 : static_cast<int>((p.E + Tile::kK - 1) / Tile::kK);
    at.a.at[0] = at.b.at[0] = 0;
    at.a.at[1] = at.row;
    at.b.at[1] = at.col;
    set_batch(at.a, p.batch, p.query, static_cast<uint32_t>(at.n));
    set_batch(at.b, p.batch, p.key, static_cast<uint32_t>(at.n));
    return at;
  }
  __device__ __forceinline__ Fetched fetch(const Place& at, int) const {
    return {kMasked ? batch_offset(p.batch, p.mask, at.n, at.slice_index) : 0};
  }

  __device__ __forceinline__ void store(const Place& at, int row, const Fetched& fetched, float (&product)[Tile::kN / 2],
                                        uint32_t s_strip) const {
    const bool plain = !kMasked && wholly_visible<Tile>(at);
    if (!plain || !store_plain(at, row, product, s_strip)) store_any(at, row, fetched, product, s_strip);
  }

  // A tile whose keys all exist and are visible: no score is computed, as the largest product is the largest score's. False where
  // that, or the multiply-add that makes exponents of products, does not hold: then nothing is stored.
  __device__ __forceinline__ bool store_plain(const Place& at, int row, const float (&product)[Tile::kN / 2],
                                              uint32_t s_strip) const {
    const float scale = static_cast<float>(p.scale), unit = scale * kLog2E;
    float references[kSegments][2];
    bool usual = scales_exponents(scale);
#pragma unroll
    for (int segment = 0; segment < kSegments; ++segment) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float largest = scale * segment_max(product, segment, half);
        references[segment][half] = segment_reference(largest);
        usual = usual && fabsf(largest) < kLargeScore;
      }
    }
    if (!__all_sync(0xffffffffu, usual)) return false;
#pragma unroll
    for (int segment = 0; segment < kSegments; ++segment) {
      float x[kSegment / 2];
#pragma unroll
      for (int i = 0; i < kSegment / 2; ++i) {
        x[i] = exp2_approx(fmaf(product[segment * (kSegment / 2) + i], unit, -kLog2E * references[segment][i / 2 % 2]));
      }
      store_segment<true>(at, row, segment, x, references[segment], s_strip);
    }
    return true;
  }

  // Any tile. What store_plain does of a row is done here as well, so that no row depends on its neighbours. Segments that none of
  // the tile's rows sees are left out: nothing reads them.
  __device__ __forceinline__ void store_any(const Place& at, int row, const Fetched& fetched, float (&product)[Tile::kN / 2],
                                            uint32_t s_strip) const {
    const float scale = static_cast<float>(p.scale);
    const bool products = !kMasked && scales_exponents(scale);
    const float after = products ? scale : 1.0f;
    const int seen = at.range.end_of_tile(at.row, Tile::kM) - at.col;
    to_scores(at, row, fetched, product, products ? 1.0f : scale, seen);
#pragma unroll
    for (int segment = 0; segment < kSegments; ++segment) {
      if (segment * kSegment >= seen) break;
      float x[kSegment / 2];
#pragma unroll
      for (int i = 0; i < kSegment / 2; ++i) x[i] = product[segment * (kSegment / 2) + i];
      const SegmentExponent exponents[2] = {{after * segment_max(x, 0, 0), after}, {after * segment_max(x, 0, 1), after}};
      // Left out for a warp without one; but a branch more costs the other instance spills.
      if (!kMasked || __any_sync(0xffffffffu, exponents[0].large || exponents[1].large)) {
#pragma unroll
        for (int i = 0; i < kSegment / 2; ++i) {
          if (exponents[i / 2 % 2].large) x[i] = exponents[i / 2 % 2].exponent(x[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < kSegment / 2; ++i) x[i] = exponents[i / 2 % 2].weight(x[i]);
      const float references[2] = {exponents[0].reference, exponents[1].reference};
      store_segment<false>(at, row, segment, x, references, s_strip);
    }
  }

  // product times `factor` with the mask, -inf where a row does not see a key, for the first `seen` of the tile's keys. All of it
  // before the first exponential, so that what only masks need holds no register then.
  __device__ __forceinline__ void to_scores(const Place& at, int row, const Fetched& fetched, float (&product)[Tile::kN / 2],
                                            float factor, int seen) const {
    const int warp_row = row - static_cast<int>(threadIdx.x % 32 / 4);
    const int open = warp_row + 16 <= at.rows ? at.range.end_of_row(at.row + warp_row) : 0;  // all of the warp's rows see these
    const auto mask_row = [&](int half) {  // of the last row for rows that do not exist
      return fetched.mask + (at.row + min(row + 8 * half, at.rows - 1)) * p.mask.row_stride;
    };
#pragma unroll
    for (int part = 0; part < Tile::kN / kPart; ++part) {
      if (part * kPart >= seen) break;
      const int first_key = at.col + part * kPart, key = first_key + static_cast<int>(threadIdx.x % 4 * 2);
      float x[kPart / 2];
#pragma unroll
      for (int i = 0; i < kPart / 2; ++i) x[i] = product[part * (kPart / 2) + i];
      scale_and_mask<T>(x, factor, p.mask, kMasked ? p.mask_type : MaskType::kNone, mask_row, key, at.range.keys);
      if (first_key + kPart > open) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          hide_keys(x, half, key, row + 8 * half < at.rows ? at.range.end_of_row(at.row + row + 8 * half) : 0);
        }
      }
#pragma unroll
      for (int i = 0; i < kPart / 2; ++i) product[part * (kPart / 2) + i] = x[i];
    }
  }

  // The largest of a segment of x in one of the thread's two rows.
  template <int kCount>
  static __device__ __forceinline__ float segment_max(const float (&x)[kCount], int segment, int half) {
    float max = negative_infinity(0.0f);
#pragma unroll
    for (int i = 2 * half; i < kSegment / 2; i += 4) {
      max = maximum(max, maximum(x[segment * (kSegment / 2) + i], x[segment * (kSegment / 2) + i + 1]));
    }
    return warp_max<4>(max);
  }

  // Exponentials x of a segment and its statistics, on their way to memory. kWhole: all of its rows and keys exist.
  template <bool kWhole>
  __device__ __forceinline__ void store_segment(const Place& at, int row, int segment, const float (&x)[kSegment / 2],
                                                const float (&references)[2], uint32_t s_strip) const {
    const int lane = threadIdx.x % 32, warp_row = row - lane / 4;
    uint32_t weights[kSegment / 4];
    float sum[2] = {0.0f, 0.0f}, rounded_sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kSegment / 4; ++i) {
      weights[i] = pack_pair<T>(x[2 * i], x[2 * i + 1]);
      sum[i % 2] += x[2 * i];
      sum[i % 2] += x[2 * i + 1];
    }
    const uint32_t ones = pack_pair<T>(1.0f, 1.0f);  // the sums of what was rounded: a product with columns of ones
#pragma unroll
    for (int i = 0; i < kSegment / 4; i += 4) mma_16x8x16<T>(rounded_sum, weights + i, ones, ones);
    float4* g_statistics = static_cast<float4*>(p.statistics.data) + at.slice_index * p.statistics.slice_stride +
                           (at.slice_row + row) * p.statistics.row_stride + at.slice_col / kSegment + segment;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] = warp_sum<4>(sum[half]);
      if (lane % 4 == 0 && (kWhole || row + 8 * half < at.rows)) {
        g_statistics[8 * half * p.statistics.row_stride] = {references[half], sum[half], rounded_sum[2 * half], 0.0f};
      }
    }
    T* g_out = static_cast<T*>(p.out.data) + at.slice_index * p.out.slice_stride +
               (at.slice_row + warp_row + lane / 8) * p.out.row_stride + at.slice_col + segment * kSegment + lane % 8 * 8;
    for_each_chunk<T, 4>(weights, s_strip, [&](int chunk_row, int chunk_col, const T* chunk) {
      // A chunk that begins at an existing key may end after the last one, still inside the row's pitch: zeros.
      if (kWhole || (warp_row + chunk_row < at.rows && segment * kSegment + chunk_col < at.cols)) {
        *reinterpret_cast<uint4*>(g_out + (chunk_row - lane / 8) * p.out.row_stride) = *reinterpret_cast<const uint4*>(chunk);
      }
    });
  }
};

template <class Tile>
struct WgmmaScoresWork : WgmmaScores<Tile, false> {};
template <class Tile>
struct MaskedWgmmaScoresWork : WgmmaScores<Tile, true> {};

template <class Tile>
cudaError_t launch_tile(const QkScoresParams& params, cudaStream_t stream) {
  const int64_t keys = params.slice.col_begin + params.slice.col_count;
  static_assert(Tile::kM == kWgmmaTileRows && Tile::kN == kWgmmaTileCols, "slices are planned for these tiles");
  WgmmaMaps maps;
  cudaError_t status = make_tensor_map(maps.a, params.type, params.batch, params.query, params.L, params.E, Tile::kM);
  if (status == cudaSuccess) status = make_tensor_map(maps.b, params.type, params.batch, params.key, keys, params.E, Tile::kN);
  if (status != cudaSuccess) return status;
  const int64_t tiles = params.slice.batch_count * ScoreTiles<Tile, true>(params.slice, params.sequence.causal).of_matrix();
  return params.mask_type == MaskType::kNone ? launch_wgmma_tiles<WgmmaScoresWork, Tile>(params, maps, tiles, stream)
                                             : launch_wgmma_tiles<MaskedWgmmaScoresWork, Tile>(params, maps, tiles, stream);
}

}  // namespace

cudaError_t launch_wgmma_scores(const QkScoresParams& params, cudaStream_t stream) {
  return dispatch_half_type(params.type,
                            [&](auto element) { return launch_tile<WgmmaTile<decltype(element), false>>(params, stream); });
}

}  // namespace attention_ext
