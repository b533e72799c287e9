// Stage 1: scores = scale * query . key^T + mask, -inf where a key is hidden (visibility/), for one slice.
// For half types the forward takes them as exponentials instead: exp(score - reference of its segment of 64 keys) in half
// precision, with the segments' statistics, which halves what is written and spares stage 2 its passes where the
// segments of a row share a reference (kReferenceStep). In the backward the same product ends in probabilities exp(score - lse).
//
// Product of a block tile on Tensor Cores or CUDA cores, gemm/mainloop.cuh, then per quad of columns: scale, mask, store.
// Tiles that no row sees return at once.
// Grid: one CTA per block tile of every matrix of the slice (tile_of). 128 threads (half types) or 256.
// Shared memory: 74,752 bytes (half types), 62,464 (float), 56,320 (double). Registers: launch bounds of the tile table.
#include "attention/pipeline/params.h"
#include "attention/softmax/segment.cuh"
#include "attention/visibility/score_modifier.cuh"
#include "attention/visibility/score_place.cuh"
#include "core/dispatch.h"
#include "gemm/mainloop.cuh"

namespace attention_ext {
namespace {

template <class Tile, ScoresAs kOutput>
struct ScoresWork {
  using T = typename Tile::T;
  using Acc = typename Tile::Acc;
  using Out = std::conditional_t<kOutput == ScoresAs::kScores, Acc, T>;

  const QkScoresParams& p;
  int m_tiles, n_tiles;
  int64_t first_batch;

  __device__ __forceinline__ ScorePlace place() const {
    return score_place<Tile>(p.slice, p.sequence, tile_of(blockIdx.x, m_tiles, n_tiles, first_batch));
  }

  __device__ __forceinline__ int aim(TileLoader<Tile, typename Tile::A>& query, TileLoader<Tile, typename Tile::B>& key) const {
    const ScorePlace at = place();
    const int E = at.hidden ? 0 : static_cast<int>(p.E);
    query.aim(at.n, at.slice_index, at.row, at.row + at.rows, 0, E);
    key.aim(at.n, at.slice_index, at.col, at.col + at.cols, 0, E);
    return steps_of<Tile>(E);
  }

  // For probabilities: the row's log-sum-exp, and what makes its probabilities sum to 1.
  __device__ __forceinline__ RowValues<Acc> fetch_row(int row) const {
    RowValues<Acc> values = {0, 1};
    if constexpr (kOutput == ScoresAs::kProbabilities) {
      const ScorePlace at = place();
      if (row < at.rows) {
        const Acc* g_lse = static_cast<const Acc*>(p.lse.data) + batch_offset(p.batch, p.lse, at.n, at.slice_index);
        values.first = g_lse[(at.row + row) * p.lse.row_stride];
        if (p.norm != nullptr) values.second = static_cast<const Acc*>(p.norm)[at.n * p.L + at.row + row];
      }
    }
    return values;
  }
  __device__ __forceinline__ RowValues<Acc> row_value(RowValues<Acc> values) const { return values; }

  // x = the scores of a quad.
  __device__ __forceinline__ void scores_of(const ScorePlace& at, int64_t mask_offset, int tile_row, int tile_col,
                                            const Acc (&dot)[4], Acc scale, Acc (&x)[4]) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = dot[e];
    make_scores<T>(x, scale, p.mask, p.mask_type, mask_offset, at.range, at.row + tile_row, at.col + tile_col);
  }

  __device__ __forceinline__ void store(const Multiply<Tile>& product, typename Tile::Shared& shared) const {
    const ScorePlace at = place();
    if (at.hidden && !p.write_hidden_tiles) return;
    Out* g_out = static_cast<Out*>(p.out.data) + batch_offset(p.batch, p.out, at.n, at.slice_index) +
                 at.slice_row * p.out.row_stride + at.slice_col * p.out.col_stride;
    const int64_t mask_offset = p.mask_type == MaskType::kNone ? 0 : batch_offset(p.batch, p.mask, at.n, at.slice_index);
    if constexpr (kOutput == ScoresAs::kExponentials) {
      if (p.mask_type == MaskType::kNone && wholly_visible<Tile>(at)) {  // the scores are the scaled products
        store_exponentials<true>(at, mask_offset, g_out, product, shared);
      } else {
        store_exponentials<false>(at, mask_offset, g_out, product, shared);
      }
    } else {
      product.template for_each_quad<false>(shared, at.rows, at.cols, [&](int row, int col, const Acc(&dot)[4]) {
        Acc x[4];
        scores_of(at, mask_offset, row, col, dot, static_cast<Acc>(p.scale), x);
        if constexpr (kOutput == ScoresAs::kProbabilities) {
          // A row without a visible key has lse -inf, and probability 0 rather than exp(-inf + inf).
          const Acc lse = shared.row[row].first, norm = shared.row[row].second;
          const bool dead = lse == negative_infinity(Acc(0));
#pragma unroll
          for (int e = 0; e < 4; ++e) x[e] = dead ? Acc(0) : exp_difference<T>(x[e], lse) * norm;
        }
        store_quad(g_out + row * p.out.row_stride, col, at.cols, p.out.col_stride, p.out.vector, x);
      });
    }
  }

  // A strip is one segment wide. Two lanes share a row, quad by quad in turn: maximum and sum of the segment stay in their
  // registers but for one shuffle. The exponentials go back through the strip, so that rows are stored 16 bytes at a time.
  template <bool kPlain>
  __device__ __forceinline__ void store_exponentials(const ScorePlace& at, int64_t mask_offset, Out* g_out,
                                                     const Multiply<Tile>& product, typename Tile::Shared& shared) const {
    static_assert(Tile::kStripCols == kSegment && Tile::kStripRows == 16, "two lanes a row, one segment wide");
    constexpr int kQuads = kSegment / 8, kChunk = 8, kHalfPitch = kSegment + 8;
    const int lane = threadIdx.x % 32, lane_row = lane / 2;
    const Acc scale = static_cast<Acc>(p.scale);
    const bool products = p.mask_type == MaskType::kNone && scales_exponents(scale);
    const Acc before = products ? Acc(1) : scale, after = products ? scale : Acc(1);
    product.for_each_strip(shared, [&](float* s_strip, int strip_row, int strip_col) {
      const int row = strip_row + lane_row;
      Acc x[kQuads][4];
      Acc max = negative_infinity(Acc(0));
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const int col = (2 * quad + lane % 2) * 4;
        const Quad<float> dot = *reinterpret_cast<const Quad<float>*>(s_strip + lane_row * Tile::kStripPitch + col);
        if constexpr (kPlain) {
#pragma unroll
          for (int e = 0; e < 4; ++e) x[quad][e] = before * dot.value[e];
        } else if (row < at.rows && strip_col + col < at.cols) {
          scores_of(at, mask_offset, row, strip_col + col, dot.value, before, x[quad]);
        } else {
          x[quad][0] = x[quad][1] = x[quad][2] = x[quad][3] = negative_infinity(Acc(0));
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) max = maximum(max, x[quad][e]);
      }
      max = maximum(max, __shfl_xor_sync(0xffffffffu, max, 1));
      const SegmentExponent exponent(after * max, after);
      if (exponent.large) {
#pragma unroll
        for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
          for (int e = 0; e < 4; ++e) x[quad][e] = exponent.exponent(x[quad][e]);
        }
      }
      __syncwarp();  // the strip has been read

      T* s_half = reinterpret_cast<T*>(s_strip);
      Acc sum = 0, rounded_sum = 0;
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        Quad<T> weights;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const Acc weight = exponent.weight(x[quad][e]);
          weights.value[e] = from_accumulator<T>(weight);
          sum += weight;
          rounded_sum += to_accumulator(weights.value[e]);
        }
        *reinterpret_cast<Quad<T>*>(s_half + lane_row * kHalfPitch + (2 * quad + lane % 2) * 4) = weights;
      }
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      rounded_sum += __shfl_xor_sync(0xffffffffu, rounded_sum, 1);
      if (lane % 2 == 0 && row < at.rows && strip_col < at.cols) {
        static_cast<SegmentStatistics*>(
            p.statistics.data)[at.slice_index * p.statistics.slice_stride + (at.slice_row + row) * p.statistics.row_stride +
                               (at.slice_col + strip_col) / kSegment] = {exponent.reference, sum, rounded_sum};
      }
      __syncwarp();  // the exponentials are there
#pragma unroll
      for (int chunk = lane; chunk < Tile::kStripRows * kSegment / kChunk; chunk += 32) {
        const int chunk_row = chunk / (kSegment / kChunk), chunk_col = chunk % (kSegment / kChunk) * kChunk;
        // A chunk that begins at an existing key may end after the last one, still inside the row's pitch: zeros.
        if (kPlain || (strip_row + chunk_row < at.rows && strip_col + chunk_col < at.cols)) {
          *reinterpret_cast<uint4*>(g_out + (strip_row + chunk_row) * p.out.row_stride + strip_col + chunk_col) =
              *reinterpret_cast<const uint4*>(s_half + chunk_row * kHalfPitch + chunk_col);
        }
      }
    });
  }
};

template <class Tile, ScoresAs kOutput>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    qk_scores_kernel(const __grid_constant__ QkScoresParams p, int m_tiles, int n_tiles, int64_t first_batch) {
  const ScoresWork<Tile, kOutput> work = {p, m_tiles, n_tiles, first_batch};
  run_tile<Tile>(work, TileLoader<Tile, typename Tile::A>(p.batch, p.query),
                 TileLoader<Tile, typename Tile::B>(p.batch, p.key));
}

}  // namespace

cudaError_t launch_qk_scores(const QkScoresParams& params, cudaStream_t stream) {
  return dispatch_type(params.type, [&](auto element) {
    using Tile = RowsByRows<decltype(element)>;
    const auto launch = [&](auto* kernel) {
      return launch_tiles<Tile>(kernel, params, params.slice.row_count, params.slice.col_count, params.slice.batch_count,
                                stream);
    };
    switch (params.output) {
      case ScoresAs::kScores: return launch(qk_scores_kernel<Tile, ScoresAs::kScores>);
      case ScoresAs::kProbabilities: return launch(qk_scores_kernel<Tile, ScoresAs::kProbabilities>);
      case ScoresAs::kExponentials:
        if constexpr (sizeof(element) == 2) return launch(qk_scores_kernel<Tile, ScoresAs::kExponentials>);
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace attention_ext
