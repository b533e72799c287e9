// Scores of the backward of float32 attention by half terms (Hopper), for head dims up to 128: of a tile both products, weights and
// dP, and all of that twice, since products of so short sums take less time than scores on their way to memory and back.
//
// 1. kSums: of each row and segment of 64 keys reference and sum of the weights, and what it adds to delta. No score is kept. Of
//    whole rows score_terms.cu makes reference, sum and delta of them.
// 2. kTerms: the same products again, to the same bits; P = weight / sum and dS = P * (dP - delta) as two half terms, one power of
//    two for every 64 x 64, which is a warpgroup's rows by a segment.
// Block tiles of 128 queries by 128 keys as in scores.cu, by the steps of gemm/sm90/steps.cuh: those along E, then those along Ev.
// With dropout dP is of the weights that are kept, and P is written as keep * P.
// Grid: persistent CTAs, one an SM; 384 threads. Shared memory: ScorePairsShared, 210 KB. Registers: 232 a consumer thread: 64
// weights, 64 of dP, 64 of a part, the rest addresses.
#include "attention/sm90/split_half/backward.h"
#include "attention/sm90/split_half/segment_weights.cuh"
#include "attention/sm90/split_half/terms_map.h"
#include "attention/visibility/dropout.cuh"
#include "attention/visibility/score_place.cuh"
#include "device/common/batch.cuh"
#include "gemm/sm90/steps.cuh"
#include "gemm/split_half/epilogue.cuh"
#include "gemm/split_half/terms.cuh"

namespace attention_ext {
namespace {

using PairsTile = SplitHalfWgmmaTile<false, kSplitHalfPromoted>;
constexpr int kSegments = PairsTile::kN / kSegment, kOfSegment = kSegment / 2;  // of a thread: two rows' share of a segment
static_assert(kSegments * kOfSegment == PairsTile::kN / 2, "a thread's sums");
static_assert(kSegment == kSplitHalfBlock && PairsTile::kM == 2 * kSplitHalfBlock,
              "a warpgroup's rows by a segment have one power");

using PairsTiles = ScoreTiles<PairsTile, false>;

struct ScorePairsMaps {
  CUtensorMap query, key, grad_out, value;
};

struct ScorePairsShared {
  PairsTile::Shared tile;
  uint32_t largest[2][PairsTile::kConsumers][2 * kSegments][4];  // of a warp's rows; one tile's and the next one's
};

template <bool kMasked, bool kTerms>
struct ScorePairs {
  const SplitHalfScorePairsParams& p;
  const PairsTiles& list;  // a parameter, as registers are short

  // What of a tile is read before its products.
  struct Fetched {
    int query, grad_out, keys[kSegments], values[kSegments];  // exponents
    float references[2], sums[2];                             // of the thread's two rows
    int64_t mask;                                             // offset of the matrix's
  };

  // visit(place) for this CTA's tiles that any row sees: matrix after matrix or, under a mask, the same tile of all matrices before
  // the next one, so that those that share a matrix of the mask read it from memory once. Not where matrices see different numbers
  // of keys, as a CTA might have tiles of one matrix alone.
  template <class Visit>
  __device__ __forceinline__ void for_each_tile(Visit visit) const {
    const Slice& slice = p.weights.slice;
    const unsigned matrices = static_cast<unsigned>(slice.batch_count), tiles = matrices * list.of_matrix();
    const bool in_turn = kMasked && p.weights.sequence.key_lengths == nullptr;
#pragma unroll 1
    for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const unsigned number = in_turn ? tile % matrices * list.of_matrix() + tile / matrices : tile;
      const ScorePlace at = score_place<PairsTile>(slice, p.weights.sequence, list.at(number));
      if (!at.hidden) visit(at);
    }
  }
  __device__ __forceinline__ int64_t key_matrix(const ScorePlace& at) const {
    return matrix_of_slice(at.n, p.weights.slice, p.weights.key_group);
  }
  static __device__ __forceinline__ int steps(int64_t width) {
    return static_cast<int>((width + PairsTile::kK - 1) / PairsTile::kK);
  }

  __device__ __forceinline__ void load(StepLoader<PairsTile>& loader, const ScorePairsMaps& maps) const {
    for_each_tile([&](const ScorePlace& at) {
      const auto load_product = [&](const CUtensorMap& map_a, const CUtensorMap& map_b, int64_t width) {
        TensorPosition a = {{0, at.slice_row, 0, static_cast<int>(at.slice_index), 0}};
        TensorPosition b = {{0, at.slice_col, 0, static_cast<int>(key_matrix(at)), 0}};
        loader.template load<false, false>(map_a, a, map_b, b, steps(width));
      };
      load_product(maps.query, maps.key, p.weights.E);
      load_product(maps.grad_out, maps.value, p.grads.E);
    });
  }

  // row: the thread's first of the tile.
  __device__ __forceinline__ void multiply(StepMultiplier<PairsTile>& multiplier, uint32_t s_strip, int row,
                                           ScorePairsShared& shared) const {
    int turn = 0;
    for_each_tile([&](const ScorePlace& at) {
      const Fetched fetched = fetch(at, row);
      if constexpr (kMasked) {
        prefetch_mask<PairsTile::kN>(p.weights.mask, p.weights.mask_type, fetched.mask, at.row + row, at.row + at.rows, at.col,
                                     at.range.keys);
      }
      float weights[PairsTile::kN / 2], grads[PairsTile::kN / 2];
      PlainPromotion of_weights(weights);
      multiplier.template multiply_terms<false, false>(weights, steps(p.weights.E), of_weights);
      SplitHalfSegment of_rows[kSegments][2];
      make_weights(at, row, fetched, weights, of_rows);
      if constexpr (kTerms) make_probabilities(fetched, of_rows, weights);
      PlainPromotion of_grads(grads);
      multiplier.template multiply_terms<false, false>(grads, steps(p.grads.E), of_grads);
      float deltas[2] = {};  // read here, out of L1, as registers were short
      if constexpr (kTerms) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (row + 8 * half < at.rows) deltas[half] = row_values(at, row + 8 * half).delta;
        }
      }
      make_grads(fetched, grads);
      if (p.grads.dropout.seed != nullptr) drop(at, row, weights, grads);
      if constexpr (kTerms) {
        make_score_grads(deltas, weights, grads);
        store_terms(at, row, weights, grads, s_strip, shared.largest[turn]);
        turn ^= 1;
      } else {
        store_sums(at, row, of_rows, weights, grads);
      }
    });
  }

 private:
  __device__ __forceinline__ Fetched fetch(const ScorePlace& at, int row) const {
    const SplitHalfScoresParams &of_weights = p.weights, &of_grads = p.grads;
    const Slice& slice = of_weights.slice;
    const int64_t row_blocks = (slice.row_count + kSplitHalfBlock - 1) / kSplitHalfBlock,
                  key_blocks = (slice.col_count + kSplitHalfBlock - 1) / kSplitHalfBlock;
    const int64_t row_block = at.slice_index * row_blocks + (at.slice_row + row) / kSplitHalfBlock,
                  key_block = key_matrix(at) * key_blocks + at.slice_col / kSegment;
    const bool exists = row / kSplitHalfBlock * kSplitHalfBlock < at.rows;
    Fetched fetched;
    fetched.query = exists ? of_weights.query_exponents[row_block] : kRowOfZeros;
    fetched.grad_out = exists ? of_grads.query_exponents[row_block] : kRowOfZeros;
#pragma unroll
    for (int segment = 0; segment < kSegments; ++segment) {
      const bool any = segment * kSegment < at.cols;
      fetched.keys[segment] = any ? of_weights.key_exponents[key_block + segment] : kRowOfZeros;
      fetched.values[segment] = any ? of_grads.key_exponents[key_block + segment] : kRowOfZeros;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool is_read = kTerms && row + 8 * half < at.rows;
      fetched.references[half] = is_read ? row_values(at, row + 8 * half).reference : 0.0f;
      fetched.sums[half] = is_read ? row_values(at, row + 8 * half).sum : 1.0f;
    }
    fetched.mask = kMasked ? batch_offset(of_weights.batch, of_weights.mask, static_cast<uint32_t>(at.n), at.slice_index) : 0;
    return fetched;
  }
  // Of the tile, counted over the slice's matrices.
  __device__ __forceinline__ int64_t first_row(const ScorePlace& at) const {
    return at.slice_index * p.weights.slice.row_count + at.slice_row;
  }

  __device__ __forceinline__ const SplitHalfRowValues& row_values(const ScorePlace& at, int row) const {
    return p.terms.row_values[first_row(at) + row];
  }

  // Products to weights, relative to their segment's reference.
  __device__ __forceinline__ void make_weights(const ScorePlace& at, int row, const Fetched& fetched,
                                               float (&weights)[PairsTile::kN / 2],
                                               SplitHalfSegment (&of_rows)[kSegments][2]) const {
    SegmentPlace place = {at.n, fetched.mask, at.range, at.row + row, at.row + at.rows, 0, at.col};
    place.open = open_keys(place.range, place.row, place.end_row);
    bool too_large = false;
#pragma unroll
    for (int segment = 0; segment < kSegments; ++segment) {
      float x[kOfSegment];
#pragma unroll
      for (int i = 0; i < kOfSegment; ++i) x[i] = weights[segment * kOfSegment + i];
      if (segment * kSegment < at.cols) {
        too_large = make_segment_weights<kMasked, 0, !kTerms>(x, p.weights, place, fetched.query + fetched.keys[segment],
                                                              of_rows[segment]) ||
                    too_large;
      } else {
        of_rows[segment][0] = of_rows[segment][1] = {negative_infinity(0.0f), 0.0f};
#pragma unroll
        for (int i = 0; i < kOfSegment; ++i) x[i] = 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kOfSegment; ++i) weights[segment * kOfSegment + i] = x[i];
      place.key += kSegment;
    }
    if (!kTerms && too_large) p.weights.marks[at.n] = 1;
  }

  // Products to the gradients of the weights.
  __device__ __forceinline__ void make_grads(const Fetched& fetched, float (&grads)[PairsTile::kN / 2]) const {
    const float factor = static_cast<float>(p.grads.factor);
#pragma unroll
    for (int i = 0; i < PairsTile::kN / 2; ++i) {
      grads[i] = times_power_of_two(grads[i] * factor, fetched.grad_out + fetched.values[i / kOfSegment]);
    }
  }
  // Gradients of the weights that dropout drops to 0; the probabilities among the weights get the sign until they are dropped.
  __device__ __forceinline__ void drop(const ScorePlace& at, int row, float (&weights)[PairsTile::kN / 2],
                                       float (&grads)[PairsTile::kN / 2]) const {
    visit_kept<PairsTile::kN / 2>(p.grads.dropout, at.n, at.row + row, at.col, [&](int i, bool kept) {
      if (!kept) grads[i] = 0.0f;
      if (kTerms && !kept) weights[i] = -weights[i];
    });
  }

  // Of each row and segment: reference, sum, what it adds to delta. A row that sees one key has the very gradient for delta.
  __device__ __forceinline__ void store_sums(const ScorePlace& at, int row, const SplitHalfSegment (&of_rows)[kSegments][2],
                                             const float (&weights)[PairsTile::kN / 2],
                                             const float (&grads)[PairsTile::kN / 2]) const {
    const SplitHalfScoresParams& of_weights = p.weights;
    const int64_t rows = of_weights.slice.row_count;
    int64_t place = (at.slice_index * (of_weights.pitch / kSegment) + at.col / kSegment) * rows + at.slice_row + row;
    uint32_t largest = 0;  // whose weight is not 0
#pragma unroll
    for (int segment = 0; segment < kSegments; ++segment) {
      if (segment * kSegment >= at.cols) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const SplitHalfSegment& of_row = of_rows[segment][half];
        const bool exists = row + 8 * half < at.rows;
        float delta = 0.0f;
#pragma unroll
        for (int i = 2 * half; i < kOfSegment; i += 4) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float weight = weights[segment * kOfSegment + i + e], grad = grads[segment * kOfSegment + i + e];
            if (!exists || weight == 0.0f) continue;
            delta = of_row.sum < 0.0f ? grad : fmaf(weight, grad, delta);
            largest = max(largest, __float_as_uint(grad) & 0x7fffffffu);
          }
        }
        delta = warp_sum<4>(delta);
        if (exists && threadIdx.x % 4 == 0) {
          of_weights.segments[place + 8 * half] = of_row;
          p.grads.deltas[place + 8 * half] = delta;
        }
      }
      place += rows;
    }
    largest = __reduce_max_sync(0xffffffffu, largest);
    uint32_t& of_matrix = p.grads.largest_grads[at.n];
    if (threadIdx.x % 32 == 0 && largest > of_matrix) atomicMax(&of_matrix, largest);
  }

  // Weights to P, before dropout.
  static __device__ __forceinline__ void make_probabilities(const Fetched& fetched,
                                                            const SplitHalfSegment (&of_rows)[kSegments][2],
                                                            float (&weights)[PairsTile::kN / 2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = fetched.sums[half], inverse = 1.0f / sum;
#pragma unroll
      for (int segment = 0; segment < kSegments; ++segment) {
        const float factor = segment_factor(of_rows[segment][half].reference, fetched.references[half]);
#pragma unroll
        for (int i = segment * kOfSegment + 2 * half; i < (segment + 1) * kOfSegment; i += 4) {
          weights[i] = quotient(weights[i] * factor, sum, inverse);
          weights[i + 1] = quotient(weights[i + 1] * factor, sum, inverse);
        }
      }
    }
  }
  // Gradients of the weights to dS, P to what dropout keeps of it.
  static __device__ __forceinline__ void make_score_grads(const float (&deltas)[2], float (&weights)[PairsTile::kN / 2],
                                                          float (&grads)[PairsTile::kN / 2]) {
#pragma unroll
    for (int i = 0; i < PairsTile::kN / 2; ++i) {
      grads[i] = weights[i] == 0.0f ? 0.0f : fabsf(weights[i]) * (grads[i] - deltas[i / 2 % 2]);
      if (weights[i] < 0.0f) weights[i] = 0.0f;
    }
  }
  // a / b, given 1 / b: rounded as a division's is, so that a row's only weight over its sum is 1.
  static __device__ __forceinline__ float quotient(float a, float b, float inverse) {
    const float near = a * inverse;
    return fmaf(fmaf(-near, b, a), inverse, near);
  }

  // The largest magnitude of the warp's, as its bits, which order as they do: NaN above infinity.
  static __device__ __forceinline__ uint32_t largest_of(const float (&x)[PairsTile::kN / 2], int segment) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kOfSegment; ++i) {
      largest = max(largest, __float_as_uint(x[segment * kOfSegment + i]) & 0x7fffffffu);
    }
    return __reduce_max_sync(0xffffffffu, largest);
  }

  __device__ __forceinline__ void store_terms(const ScorePlace& at, int row, float (&weights)[PairsTile::kN / 2],
                                              float (&grads)[PairsTile::kN / 2], uint32_t s_strip,
                                              uint32_t (&largest_of_tile)[PairsTile::kConsumers][2 * kSegments][4]) const {
    const int consumer = row / 64, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, warp_row = row - lane / 4;
    uint32_t (&s_largest)[2 * kSegments][4] = largest_of_tile[consumer];
#pragma unroll
    for (int segment = 0; segment < kSegments; ++segment) {
      const uint32_t of_weights = largest_of(weights, segment), of_grads = largest_of(grads, segment);
      if (lane == 0) {
        s_largest[segment][warp] = of_weights;
        s_largest[kSegments + segment][warp] = of_grads;
      }
    }
    barrier_sync(kBarrierRows + consumer, 128);  // the warpgroup's largest are there; those of the tile before have been read
    const int64_t row_blocks = (p.weights.slice.row_count + kSplitHalfBlock - 1) / kSplitHalfBlock;
    const int64_t block =
        (at.slice_index * row_blocks + (at.slice_row + consumer * 64) / kSplitHalfBlock) * (p.weights.pitch / kSegment) +
        at.col / kSegment;
    if (consumer * 64 >= at.rows) return;  // a whole warpgroup
    const auto store = [&](float (&x)[PairsTile::kN / 2], int first, void* array, int32_t* g_exponents) {
#pragma unroll
      for (int segment = 0; segment < kSegments; ++segment) {
        if (segment * kSegment >= at.cols) break;
        uint32_t largest = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) largest = max(largest, s_largest[first + segment][i]);
        const SplitHalfScale scale(largest);
        if (threadIdx.x % 128 == 0) {
          g_exponents[block + segment] = largest == 0 ? kRowOfZeros : scale.exponent;
          if (!scale.finite) p.terms.marks[at.n] = 1;
        }
        float high[kOfSegment], low[kOfSegment];
#pragma unroll
        for (int i = 0; i < kOfSegment; ++i) {
          high[i] = x[segment * kOfSegment + i];
          scale.split(high[i], low[i]);
        }
        __half* g_block = reinterpret_cast<__half*>(static_cast<float*>(array) + (first_row(at) + warp_row) * p.weights.pitch +
                                                    at.col + segment * kSegment);
        const auto store_rows = [&](const float (&terms)[kOfSegment], int of) {
          for_each_chunk<__half, 4>(terms, s_strip, [&](int chunk_row, int chunk_col, const __half* chunk) {
            if (warp_row + chunk_row >= at.rows) return;
            *reinterpret_cast<uint4*>(g_block + 2 * chunk_row * p.weights.pitch + of * kSegment + chunk_col) =
                *reinterpret_cast<const uint4*>(chunk);
          });
        };
        store_rows(high, 0);
        store_rows(low, 1);
      }
    };
    store(weights, 0, p.terms.weights, p.terms.weight_exponents);
    store(grads, kSegments, p.terms.grads, p.terms.grad_exponents);
  }
};

template <class Work, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    split_half_score_pairs_kernel(const __grid_constant__ SplitHalfScorePairsParams params,
                                  const __grid_constant__ ScorePairsMaps maps, const __grid_constant__ PairsTiles list) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  ScorePairsShared& shared = *reinterpret_cast<ScorePairsShared*>(s_bytes);
  const Work pairs = {params, list};
  run_warpgroups<Tile>(
      shared.tile, [&](StepLoader<Tile>& loader) { pairs.load(loader, maps); },
      [&](StepMultiplier<Tile>& multiplier, uint32_t s_strip, int row) { pairs.multiply(multiplier, s_strip, row, shared); });
#else
  __trap();  // never launched: an image for another card must not return what nobody wrote
#endif
}

template <class Work>
cudaError_t launch(const SplitHalfScorePairsParams& params, const ScorePairsMaps& maps, cudaStream_t stream) {
  const Slice& slice = params.weights.slice;
  const PairsTiles list(slice, params.weights.sequence.causal);
  return launch_persistent<PairsTile, sizeof(ScorePairsShared)>(
      split_half_score_pairs_kernel<Work, PairsTile>, slice.batch_count * list.of_matrix(), stream, params, maps, list);
}

}  // namespace

cudaError_t launch_split_half_score_pairs(const SplitHalfScorePairsParams& params, bool terms, void* query_terms,
                                          void* key_terms, void* grad_out_terms, void* value_terms, cudaStream_t stream) {
  const SplitHalfScoresParams& of_weights = params.weights;
  const Slice& slice = of_weights.slice;
  const int64_t keys = matrices_of_slice(slice, of_weights.key_group);
  ScorePairsMaps maps;
  cudaError_t status = cudaSuccess;
  const auto make = [&](CUtensorMap& map, void* of, int64_t matrices, int64_t rows, int64_t cols) {
    if (status == cudaSuccess) status = make_terms_map(map, of, matrices, rows, cols, PairsTile::kM);
  };
  make(maps.query, query_terms, slice.batch_count, slice.row_count, of_weights.E);
  make(maps.grad_out, grad_out_terms, slice.batch_count, slice.row_count, params.grads.E);
  make(maps.key, key_terms, keys, slice.col_count, of_weights.E);
  make(maps.value, value_terms, keys, slice.col_count, params.grads.E);
  if (status != cudaSuccess) return status;
  if (of_weights.mask_type != MaskType::kNone) {
    return terms ? launch<ScorePairs<true, true>>(params, maps, stream) : launch<ScorePairs<true, false>>(params, maps, stream);
  }
  return terms ? launch<ScorePairs<false, true>>(params, maps, stream) : launch<ScorePairs<false, false>>(params, maps, stream);
}

}  // namespace attention_ext
