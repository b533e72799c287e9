// A tile of the column kernel in shared memory, and what its consumers make of scores, be they of one kind or of two.
#pragma once

#include "attention/sm90/rows_backward/parts.cuh"
#include "device/sm90/tma.cuh"
#include "plan/sm90_rows.h"

namespace attention_ext {

// kGeneral_: there is a mask or dropout.
template <class T_, int kClass, bool kGeneral_>
struct ColumnGradTile {
  using T = T_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr RowsBackwardShape kShape = rows_backward_shape(kClass, kGeneral);
  static constexpr int kN = kShape.col_keys;
  static constexpr bool kRoles = kShape.roles(), kAhead = kShape.col_ahead;
  static constexpr int kM = kShape.col_queries, kRecords = kM / QueryRecord::kQueries;
  static_assert(kM % QueryRecord::kQueries == 0, "a block has whole records");
  static constexpr int kStep = 64;  // of E or Ev: a row of 128 bytes, the widest swizzle
  static constexpr int kSteps = kShape.steps;
  static constexpr int kPlaces = kShape.col_places, kStages = kShape.col_stages;
  static constexpr int kMarkedKeys = kShape.marked_keys();
  static_assert(!kGeneral || (kM == kMarkedRows && kN % kMarkedKeys == 0), "a block is whole cells of the marks");

  // What a tile is. It stays in shared memory, as registers are scarce.
  struct Work {
    uint32_t n, heads;             // query heads of the group, or of the part: flat batch index of the first one, how many
    int key, keys;                 // the first one; those of the matrix that any query sees
    int begin, end;                // blocks of queries that see some of the tile's; under a mask as many, or none
    int64_t key_grad, value_grad;  // where the tile's first key lies
  };
  static constexpr int kWorks = kPlaces + 2;  // one is written before its place is free; consumers may be in the tile before

  // Where a tile comes from, and the blocks of a query head.
  struct Boxes {
    TensorPosition key, value;
  };
  struct Head {
    uint32_t n;  // flat batch index
    TensorPosition query_box, grad_box;
    const QueryRecord* g_records;
  };

  // Tiles lie on 1024-byte boundaries, where the swizzle's pattern begins.
  struct Shared {
    alignas(1024) T key[kPlaces][kSteps][kN * kStep];
    alignas(1024) T value[kPlaces][kSteps][kN * kStep];
    alignas(1024) T query[kStages][kSteps][kM * kStep];
    alignas(1024) T grad_out[kStages][kSteps][kM * kStep];
    alignas(1024) T strip[kRoles ? 1 : kRowsBackwardConsumers * 4][kRoles ? 8 : 16 * kStep];  // of each warp, for gradients
    float4 weights[kRoles ? kM / 8 : 1][kRoles ? 128 : 1];  // by roles, P on its way to the other one: the same thread's
    QueryRecord records[kStages][kRecords];                 // of a stage's queries
    Work work[kWorks];
    uint64_t key_full[kPlaces];   // TMA arrives with the bytes of keys and values; the consumers wait
    uint64_t key_empty[kPlaces];  // the consumers' threads arrive; the producer waits
    uint64_t full[kStages];       // TMA arrives with the bytes of queries, records and gradients; the consumers wait
    uint64_t empty[kStages];      // the consumers' threads arrive, as each has read records; the producer waits
    uint64_t grad_full[kStages];  // by roles, of the gradients alone
    uint64_t weights_full[4];     // the threads of the one role's warp arrive when P is there; the other's wait
    uint64_t weights_empty[4];    // and when it has been read
    // Of the general instance: StageMark of a stage's queries; the producer's own, whose registers are scarce.
    int marked[kGeneral ? kStages : 1];
    Boxes boxes;
    Head head;
  };
  static_assert(sizeof(Shared) <= 227 * 1024, "an SM gives a CTA 227 KB of shared memory");
};

// What the general instance's producer says of a stage, bits: it is the tile's last one; the mask shows all of it.
enum StageMark { kLastOfTile = 1, kShownWhole = 2 };

// Two values of QueryRecord of a thread's i-th pair of adjacent queries. at: of the record, as &QueryRecord::lse.
__device__ __forceinline__ float2 query_pair(const QueryRecord* records, float (QueryRecord::*at)[QueryRecord::kQueries],
                                             int i) {
  return *reinterpret_cast<const float2*>(&(records[i / 4].*at)[threadIdx.x % 4 * 2 + 8 * (i % 4)]);
}

// Whether some of the scores of a stage need careful_weight, or are hidden: a query before a key does not see it. first_row: of the
// consumer's 64 keys in the tile.
template <class Tile>
__device__ __forceinline__ bool column_careful(const RowsBackwardParams& p, const QueryRecord* records,
                                               const typename Tile::Work& work, int first_row) {
  int careful = p.sequence.causal && records[0].query < work.key + first_row + 63;
#pragma unroll
  for (int i = 0; i < Tile::kRecords; ++i) careful |= records[i].careful;
  return careful != 0;
}

// scores: products of keys with queries -> P times weight_scale. first_row: of the consumer's keys in the tile.
template <class Tile, bool kCareful, int kScores>
__device__ __forceinline__ void column_weights(float (&scores)[kScores], const RowsBackwardParams& p,
                                               const QueryRecord* records, const typename Tile::Work& work, int first_row) {
  const Exponents<typename Tile::T> exponents = {p};
  const int col = threadIdx.x % 4 * 2;
  int from_key = 8;  // of this thread's first query: from its first key; the other key is 8 further
  if (kCareful && p.sequence.causal) {
    from_key = records[0].query + col - work.key - first_row - threadIdx.x / 32 % 4 * 16 - threadIdx.x % 32 / 4;
  }
#pragma unroll
  for (int i = 0; i < kScores / 4; ++i) {  // two adjacent queries, 8 apart
    const float2 offset = query_pair(records, &QueryRecord::offset, i);
    if constexpr (!kCareful) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[4 * i + e] = exponents.weight(scores[4 * i + e], e % 2 == 0 ? offset.x : offset.y);
    } else {
      const float2 lse = query_pair(records, &QueryRecord::lse, i);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float weight =
            exponents.careful_weight(scores[4 * i + e], e % 2 == 0 ? lse.x : lse.y, e % 2 == 0 ? offset.x : offset.y);
        scores[4 * i + e] = 8 * i + e % 2 + from_key < e / 2 * 8 ? 0.0f : weight;
      }
    }
  }
}

// grads: dP -> dS. factor: of dP. dropping: a weight's sign says that dropout drops it.
template <int kScores>
__device__ __forceinline__ void column_score_grads(float (&grads)[kScores], const float (&weights)[kScores],
                                                   const QueryRecord* records, bool careful, bool dropping, float factor) {
  if (dropping) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      if (weights[i] < 0.0f) grads[i] = 0.0f;
    }
  }
#pragma unroll
  for (int i = 0; i < kScores / 4; ++i) {
    const float2 delta = query_pair(records, &QueryRecord::delta, i);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& grad = grads[4 * i + e];
      grad = fabsf(weights[4 * i + e]) * fmaf(grad, factor, e % 2 == 0 ? delta.x : delta.y);
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
