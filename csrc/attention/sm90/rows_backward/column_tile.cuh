// A tile of the column kernel in shared memory, and what its consumers make of scores, be they of one kind or of two.
#pragma once

#include "attention/sm90/rows_backward/parts.cuh"

namespace attention_ext {

// kGeneral_: there is a mask or dropout.
template <class T_, int kClass, bool kGeneral_>
struct ColumnGradTile {
  using T = T_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr RowsBackwardShape kShape = rows_backward_shape(kClass, kGeneral);
  static constexpr int kN = kShape.col_keys;
  static constexpr bool kRoles = kShape.roles(), kAhead = kShape.col_ahead;
  static constexpr int kM = kShape.col_queries;
  static constexpr int kStep = 64;  // of E or Ev: a row of 128 bytes, the widest swizzle
  static constexpr int kSteps = kShape.steps;
  static constexpr int kPlaces = kShape.col_places, kStages = kShape.col_stages;

  // What a tile is. It stays in shared memory, as registers are scarce.
  struct Work {
    uint32_t n;                    // flat batch index of the group's first query head
    int key, keys;                 // the first one; those of the matrix that any query sees
    int begin, end;                // blocks of queries that see some of the tile's
    int64_t key_grad, value_grad;  // where the tile's first key lies
  };
  static constexpr int kWorks = kPlaces + 1;  // the consumers may still be in the tile before

  // Tiles lie on 1024-byte boundaries, where the swizzle's pattern begins.
  struct Shared {
    alignas(1024) T key[kPlaces][kSteps][kN * kStep];
    alignas(1024) T value[kPlaces][kSteps][kN * kStep];
    alignas(1024) T query[kStages][kSteps][kM * kStep];
    alignas(1024) T grad_out[kStages][kSteps][kM * kStep];
    alignas(1024) T strip[kRoles ? 1 : kRowsBackwardConsumers * 4][kRoles ? 8 : 16 * kStep];  // of each warp, for gradients
    float4 weights[kRoles ? kM / 8 : 1][kRoles ? 128 : 1];  // by roles, P on its way to the other one: the same thread's
    alignas(16) float lse[kStages][kM], offset[kStages][kM], delta[kStages][kM];  // Exponents::Row of a stage's queries
    int block[kStages];                                                           // that a stage holds the queries of
    bool careful[kStages][kRowsBackwardConsumers];  // whether some of its scores need careful_weight, or are hidden
    int64_t mask_row[kGeneral ? kStages : 1][kGeneral ? kM : 1];  // where a stage's queries begin in the mask
    uint32_t head[kGeneral ? kStages : 1];                        // whose they are
    Work work[kWorks];
    uint64_t key_full[kPlaces];                  // TMA arrives with the bytes of keys and values; the consumers wait
    uint64_t key_empty[kPlaces];                 // the consumers' warps arrive; the producer waits
    uint64_t full[kStages], empty[kStages];      // the same of queries and their gradients
    uint64_t grad_full[kStages];                 // by roles, of the gradients
    uint64_t weights_full[4], weights_empty[4];  // of a warp's weights, and of the other role's warp
  };
  static_assert(sizeof(Shared) <= 227 * 1024, "an SM gives a CTA 227 KB of shared memory");
};

// scores: products of keys with queries -> P times weight_scale. first_row: of the consumer's keys in the tile.
template <class Tile, bool kCareful, int kScores>
__device__ __forceinline__ void column_weights(float (&scores)[kScores], const RowsBackwardParams& p,
                                               const typename Tile::Shared& shared, int slot, const typename Tile::Work& work,
                                               int first_row) {
  const Exponents<typename Tile::T> exponents = {p};
  const int col = threadIdx.x % 4 * 2;
  int from_key = 8;  // of this thread's first query: from its first key; the other key is 8 further
  if (kCareful && p.sequence.causal) {
    from_key = shared.block[slot] * Tile::kM + col - work.key - first_row - threadIdx.x / 32 % 4 * 16 - threadIdx.x % 32 / 4;
  }
#pragma unroll
  for (int i = 0; i < kScores / 4; ++i) {  // two adjacent queries, 8 apart
    const float2 offset = *reinterpret_cast<const float2*>(&shared.offset[slot][col + 8 * i]);
    if constexpr (!kCareful) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[4 * i + e] = exponents.weight(scores[4 * i + e], e % 2 == 0 ? offset.x : offset.y);
    } else {
      const float2 lse = *reinterpret_cast<const float2*>(&shared.lse[slot][col + 8 * i]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float weight =
            exponents.careful_weight(scores[4 * i + e], e % 2 == 0 ? lse.x : lse.y, e % 2 == 0 ? offset.x : offset.y);
        scores[4 * i + e] = 8 * i + e % 2 + from_key < e / 2 * 8 ? 0.0f : weight;
      }
    }
  }
}

// grads: dP -> dS. factor: of dP.
template <class Tile, int kScores>
__device__ __forceinline__ void column_score_grads(float (&grads)[kScores], const float (&weights)[kScores],
                                                   const typename Tile::Shared& shared, int slot, bool careful, float factor) {
  const int col = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < kScores / 4; ++i) {
    const float2 delta = *reinterpret_cast<const float2*>(&shared.delta[slot][col + 8 * i]);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& grad = grads[4 * i + e];
      grad = weights[4 * i + e] * fmaf(grad, factor, e % 2 == 0 ? delta.x : delta.y);
    }
  }
  if (careful) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      if (weights[i] == 0.0f) grads[i] = 0.0f;  // whatever a key that is not seen holds
    }
  }
}

}  // namespace attention_ext
