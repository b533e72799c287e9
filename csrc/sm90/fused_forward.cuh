// Fused forward for Hopper: out = softmax(scale * Q K^T + mask) V without scores in memory, any L and S.
//
// A CTA takes 64 query rows (of all heads of a group together: row r is query r / G of head r % G) and walks over blocks of 128 keys.
// Two consumer warpgroups own the blocks in turn and half of Ev each:
//   1. the owner of block j computes S = Q K_j^T (64 x 128) in registers,
//   2. softmaxes it: the running maximum of each row, weights P_j = exp(S - maximum) to shared memory for both,
//   3. each warpgroup adds P_j V_j to its half of O (64 x Ev / 2) in registers.
// While one warpgroup is in its softmax the other one multiplies: warpgroup 0 does S_0 | softmax, P_0 V_0 | S_2 | softmax, P_1 V_1,
// P_2 V_2 | ..., warpgroup 1 S_1 | softmax, P_0 V_0, P_1 V_1 | S_3 ... A third warpgroup's warps 0 and 1 load, one ring of 16 KB slots
// for each consumer, in the order in which it multiplies: 128 keys x 64 of E, or 32 keys x half of Ev.
// Grid: one CTA per 64 rows of a group, row tiles of a group adjacent (they share keys and values in L2), causal: longest first.
// Shared memory: FusedTile::Shared. Registers: 232 a consumer thread (O 128, S 64), 40 a producer thread.
#pragma once

#include "../device/batch.cuh"
#include "../device/cp_async.cuh"
#include "../device/math.cuh"
#include "../device/mbarrier.cuh"
#include "../device/random.cuh"
#include "../device/tma.cuh"
#include "../device/types.cuh"
#include "../device/warpgroup.cuh"
#include "../device/wgmma.cuh"
#include "../params.h"
#include "tile.h"

namespace attention_ext {

struct FusedMaps {
  CUtensorMap key, value;  // (batch dims..., keys, head dim), five dims
};

// Which rows and keys a CTA works on.
template <class Tile>
struct FusedWork {
  int64_t n_group;  // number of the group; its first query head is flat batch index n_group * G
  int group;        // G: query heads per key head
  int first_row;    // in the group's L * G rows
  int rows;         // that exist from there on
  int keys;         // that any row sees
  int open_keys;    // that every row sees

  __device__ __forceinline__ FusedWork(const ForwardParams& p, int m_tiles, int64_t first_tile) {
    int64_t tile;
    divide(first_tile + blockIdx.x, m_tiles, n_group, tile);
    group = p.key.group;
    if (p.causal) tile = m_tiles - 1 - tile;
    first_row = static_cast<int>(tile) * Tile::kM;
    rows = min(static_cast<int>(p.L) * group - first_row, Tile::kM);
    keys = open_keys = static_cast<int>(p.S);
    if (p.causal) {
      keys = min(keys, query_of(rows - 1) + 1);
      open_keys = min(open_keys, query_of(0) + 1);
    }
  }
  __device__ __forceinline__ int query_of(int row) const { return (first_row + row) / group; }
  __device__ __forceinline__ int64_t head_of(int row) const { return n_group * group + (first_row + row) % group; }
  __device__ __forceinline__ int blocks() const { return (keys + Tile::kN - 1) / Tile::kN; }
  // Slots of values that a block fills.
  __device__ __forceinline__ int value_slots(int block) const {
    return (min(keys - block * Tile::kN, Tile::kN) + Tile::kValueKeys - 1) / Tile::kValueKeys;
  }
};

// A ring's place: which slot comes next, and which time around.
template <int kSlots>
struct RingPlace {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// Loads the keys and values of one consumer warpgroup. One thread.
template <class Tile>
class FusedProducer {
 public:
  __device__ __forceinline__ FusedProducer(const ForwardParams& p, const FusedMaps& maps, typename Tile::Shared& shared,
                                           const FusedWork<Tile>& work, int consumer)
      : p_(p), maps_(maps), shared_(shared), work_(work), consumer_(consumer) {
    key_.at[0] = key_.at[1] = 0;
    int64_t n = work.n_group * work.group;
    for (int dim = 2; dim < 5; ++dim) {
      const int batch_dim = p.batch.count + 1 - dim;  // the map's dims run from the innermost outwards
      int64_t index = 0;
      if (batch_dim >= 0) {
        index = n;
        if (batch_dim > 0) divide(n, p.batch.size[batch_dim], n, index);
        if (dim == 2) index /= work.group;
      }
      key_.at[dim] = batch_dim >= 0 && p.key.batch_stride[batch_dim] != 0 ? static_cast<int>(index) : 0;
      value_.at[dim] = batch_dim >= 0 && p.value.batch_stride[batch_dim] != 0 ? static_cast<int>(index) : 0;
    }
  }

  __device__ __forceinline__ void run() {
    const int blocks = work_.blocks();
    for (int block = consumer_; block < blocks; block += 2) {
      load_keys(block);
      if (block > 0) load_values(block - 1);
      load_values(block);
    }
    if (((blocks - 1) & 1) != consumer_) load_values(blocks - 1);
  }

 private:
  // Waits until the next slot is free and says how many bytes will come.
  __device__ __forceinline__ uint32_t claim(uint32_t bytes) {
    mbarrier_wait(shared_address(&shared_.empty[consumer_][place_.slot]), place_.parity ^ 1);
    const uint32_t full = shared_address(&shared_.full[consumer_][place_.slot]);
    mbarrier_arrive_expect_bytes(full, bytes);
    return full;
  }

  __device__ __forceinline__ void load_keys(int block) {
    key_.at[1] = block * Tile::kN;
    for (key_.at[0] = 0; key_.at[0] < p_.E; key_.at[0] += Tile::kStep) {
      const uint32_t full = claim(Tile::kN * Tile::kStep * sizeof(typename Tile::T));
      tma_load(shared_address(shared_.ring[consumer_][place_.slot]), &maps_.key, key_, full);
      place_.advance();
    }
  }

  __device__ __forceinline__ void load_values(int block) {
    constexpr uint32_t kStepBytes = Tile::kValueKeys * Tile::kStep * sizeof(typename Tile::T);
    const int begin = consumer_ * Tile::kValueSteps * Tile::kStep;
    const int end = min(begin + Tile::kValueSteps * Tile::kStep, static_cast<int>(p_.Ev));
    const int steps = max(end - begin + Tile::kStep - 1, 0) / Tile::kStep;
    value_.at[1] = block * Tile::kN;
    for (int slot = 0; slot < work_.value_slots(block); ++slot) {
      const uint32_t full = claim(steps * kStepBytes);
      uint32_t s_step = shared_address(shared_.ring[consumer_][place_.slot]);
      for (value_.at[0] = begin; value_.at[0] < end; value_.at[0] += Tile::kStep) {
        tma_load(s_step, &maps_.value, value_, full);
        s_step += kStepBytes;
      }
      value_.at[1] += Tile::kValueKeys;
      place_.advance();
    }
  }

  const ForwardParams& p_;
  const FusedMaps& maps_;
  typename Tile::Shared& shared_;
  const FusedWork<Tile>& work_;
  const int consumer_;
  RingPlace<Tile::kSlots> place_;
  TensorPosition key_, value_;
};

// One consumer warpgroup. kGeneral: there is a mask or dropout.
template <class Tile, bool kGeneral>
class FusedConsumer {
 public:
  using T = typename Tile::T;

  __device__ __forceinline__ FusedConsumer(const ForwardParams& p, typename Tile::Shared& shared, const FusedWork<Tile>& work,
                                           int consumer)
      : p_(p), shared_(shared), work_(work), consumer_(consumer) {
    row_ = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    col_ = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kOut; ++i) out_[i] = 0.0f;
    sum_[0] = sum_[1] = 0.0f;
    reference_[0] = reference_[1] = negative_infinity(0.0f);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      last_key_[half] = static_cast<int>(p.S) - 1;
      if (p.causal) last_key_[half] = min(last_key_[half], work.query_of(row_ + 8 * half));
    }
    if constexpr (kGeneral) {  // the same numbers from every thread of a row, and from both warpgroups
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = min(row_ + 8 * half, work.rows - 1);
        shared.mask_row[row_ + 8 * half] =
            batch_offset(p.batch, p.mask, work.head_of(row), 0) + work.query_of(row) * p.mask.row_stride;
      }
    }
  }

  __device__ __forceinline__ void run() {
    load_query();
    const int blocks = work_.blocks();
    for (int block = consumer_; block < blocks; block += 2) {
      multiply_query_key();
      if (block > 0) mbarrier_wait(shared_address(&shared_.weights_ready[1 - consumer_]), ((block - 1) >> 1) & 1);
      softmax(block);
      if (block > 0) add_weighted_values(block - 1);
      mbarrier_wait(shared_address(&shared_.weights_ready[consumer_]), (block >> 1) & 1);
      add_weighted_values(block);
    }
    if (((blocks - 1) & 1) != consumer_) {
      mbarrier_wait(shared_address(&shared_.weights_ready[1 - consumer_]), ((blocks - 1) >> 1) & 1);
      const int last = 1 - consumer_;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sum_[half] *= shared_.factor[last][row_ + 8 * half];
        reference_[half] = shared_.reference[last][row_ + 8 * half];
      }
      add_weighted_values(blocks - 1);
    }
    store_out();
  }

 private:
  static constexpr int kOut = 32 * Tile::kValueSteps;  // accumulators of O
  static constexpr int kScores = Tile::kN / 2;

  __device__ __forceinline__ uint32_t slot_address() const { return shared_address(shared_.ring[consumer_][place_.slot]); }
  __device__ __forceinline__ void wait_full() const {
    mbarrier_wait(shared_address(&shared_.full[consumer_][place_.slot]), place_.parity);
  }
  __device__ __forceinline__ void release(int slot) const {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&shared_.empty[consumer_][slot]));
  }

  // All 256 consumer threads: the query tile, rows that do not exist and columns from E on as zeros.
  __device__ __forceinline__ void load_query() const {
    constexpr int kChunk = 16 / sizeof(T), kChunks = Tile::kStep / kChunk;
    const int thread = consumer_ * 128 + threadIdx.x % 128;
    const int steps = (static_cast<int>(p_.E) + Tile::kStep - 1) / Tile::kStep;
    const T* g_query = static_cast<const T*>(p_.query.data);
    // Threads keep their chunk column and walk down the rows of all steps.
    for (int row = thread / kChunks; row < Tile::kM; row += 256 / kChunks) {
      const bool exists = row < work_.rows;
      const T* g_row = g_query;
      if (exists) g_row += batch_offset(p_.batch, p_.query, work_.head_of(row), 0) + work_.query_of(row) * p_.query.row_stride;
      for (int step = 0; step < steps; ++step) {
        const int col = step * Tile::kStep + thread % kChunks * kChunk;
        const int valid = exists ? max(0, min(static_cast<int>(p_.E) - col, kChunk)) : 0;
        cp_async_16_zero_filled(shared_address(shared_.query[step]) + swizzled(row, thread % kChunks),
                                valid > 0 ? g_row + col : g_query, valid * static_cast<int>(sizeof(T)));
      }
    }
    cp_async_commit();
    cp_async_wait<0>();
    fence_async_proxy();
    barrier_sync(1, 256);
  }

  // scores_ = Q K^T of the next block in the ring.
  __device__ __forceinline__ void multiply_query_key() {
    const int steps = (static_cast<int>(p_.E) + Tile::kStep - 1) / Tile::kStep;
    uint32_t s_query = shared_address(shared_.query[0]);
    int previous = 0;
    for (int step = 0; step < steps; ++step) {
      wait_full();
      wgmma_fence();
      const uint64_t query = matrix_descriptor(s_query, 1024, 0), key = matrix_descriptor(slot_address(), 1024, 0);
#pragma unroll
      for (int k = 0; k < Tile::kStep; k += 16) {
        wgmma<T, false>(scores_, query + k * sizeof(T) / 16, key + k * sizeof(T) / 16, step == 0 && k == 0);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (step > 0) release(previous);
      previous = place_.slot;
      place_.advance();
      s_query += Tile::kM * Tile::kStep * sizeof(T);
    }
    wgmma_wait<0>();
    pin_registers(scores_);
    release(previous);
  }

  // scores_ -> weights of this block in shared memory, with the rows' reference and the factor that takes O to it.
  __device__ __forceinline__ void softmax(int block) {
    const int first_key = block * Tile::kN + col_;
    const float scale = static_cast<float>(p_.scale);
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores_[i] *= scale;
    if constexpr (kGeneral) add_mask(first_key);
    if (block * Tile::kN + Tile::kN > work_.open_keys) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        if (first_key + i / 4 * 8 + i % 2 > last_key_[i / 2 % 2]) scores_[i] = negative_infinity(0.0f);
      }
    }

    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float max = negative_infinity(0.0f);
#pragma unroll
      for (int i = 0; i < kScores; i += 4) max = maximum(max, maximum(scores_[i + 2 * half], scores_[i + 2 * half + 1]));
      max = maximum(max, __shfl_xor_sync(0xffffffffu, max, 1));
      max = maximum(max, __shfl_xor_sync(0xffffffffu, max, 2));
      const int row = row_ + 8 * half;
      float before = negative_infinity(0.0f), factor_before = 1.0f;
      if (block > 0) {
        before = shared_.reference[1 - consumer_][row];
        factor_before = shared_.factor[1 - consumer_][row];
      }
      reference_[half] = maximum(max, before);  // -inf where no key was visible so far; NaN is left to the weights
      const float subtract = reference_[half] == negative_infinity(0.0f) ? 0.0f : reference_[half];
      factor[half] = before == reference_[half] ? 1.0f : exp_difference<T>(before, subtract);

      float sum = 0.0f;
#pragma unroll
      for (int i = 2 * half; i < kScores; i += 4) {
        scores_[i] = exp_difference<T>(scores_[i], subtract);
        scores_[i + 1] = exp_difference<T>(scores_[i + 1], subtract);
        sum += scores_[i] + scores_[i + 1];
      }
      sum_[half] = sum_[half] * (factor_before * factor[half]) + sum;
    }
    // The other warpgroup has multiplied the weights before these; this one has too.
    if (block > 1) mbarrier_wait(shared_address(&shared_.weights_free[consumer_]), ((block >> 1) - 1) & 1);
    const int lane = threadIdx.x % 32;
    const uint32_t s_weights = shared_address(shared_.weights[consumer_]);
    const uint32_t row = row_ - lane / 4 + lane % 16;  // matrices 0 and 2: the warp's first eight rows; 1 and 3: the others
#pragma unroll
    for (int tile = 0; tile < kScores / 4; tile += 2) {
      uint32_t m[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) m[i] = pack_pair<T>(scores_[tile * 4 + 2 * i], scores_[tile * 4 + 2 * i + 1]);
      store_matrices(s_weights + weights_offset(row, tile + lane / 16), m[0], m[1], m[2], m[3]);
    }
    if constexpr (kGeneral) {
      __syncwarp();  // the warp's weights are there
      if (p_.dropout.seed != nullptr) drop(block, s_weights);
    }
    if (lane % 4 == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        shared_.reference[consumer_][row_ + 8 * half] = reference_[half];
        shared_.factor[consumer_][row_ + 8 * half] = factor[half];
      }
    }
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared_address(&shared_.weights_ready[consumer_]));
  }

  // out_ = factor * out_ + P V of a block whose weights are ready, with the values next in the ring.
  __device__ __forceinline__ void add_weighted_values(int block) {
    const int owner = block & 1;
    const float factor[2] = {shared_.factor[owner][row_], shared_.factor[owner][row_ + 8]};
    // Not left out where all factors are 1: a branch around the accumulators makes ptxas wait for every product on its own.
#pragma unroll
    for (int i = 0; i < kOut; ++i) out_[i] *= factor[i / 2 % 2];
    const uint32_t s_weights = shared_address(shared_.weights[owner]);
    const int slots = work_.value_slots(block);
    int previous = 0;
    for (int slot = 0; slot < slots; ++slot) {
      wait_full();
      wgmma_fence();
      const uint64_t weights =
          matrix_descriptor(s_weights + slot * Tile::kValueKeys / Tile::kStep * (Tile::kM * Tile::kStep * sizeof(T)) +
                                slot * Tile::kValueKeys % Tile::kStep * sizeof(T),
                            1024, 0);
      const uint64_t value = matrix_descriptor(slot_address(), 1024, Tile::kValueKeys * Tile::kStep * sizeof(T));
#pragma unroll
      for (int k = 0; k < Tile::kValueKeys; k += 16) {
        wgmma<T, true>(out_, weights + k * sizeof(T) / 16, value + k * Tile::kStep * sizeof(T) / 16);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (slot > 0) release(previous);
      previous = place_.slot;
      place_.advance();
    }
    wgmma_wait<0>();
    pin_registers(out_);
    release(previous);
    if (owner != consumer_ && threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&shared_.weights_free[owner]));
  }

  __device__ __forceinline__ void add_mask(int first_key) {
    switch (p_.mask_type) {
      case MaskType::kNone: break;
      case MaskType::kBool: add_mask_of<uint8_t>(first_key); break;
      case MaskType::kSameAsQuery: add_mask_of<T>(first_key); break;
      case MaskType::kFloat: add_mask_of<float>(first_key); break;
    }
  }
  template <class Stored>
  __device__ __forceinline__ void add_mask_of(int first_key) {
    const Stored* g_mask = static_cast<const Stored*>(p_.mask.data);
    g_mask += first_key * p_.mask.col_stride;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Stored* g_key = g_mask + shared_.mask_row[row_ + 8 * half];
#pragma unroll
      for (int i = 2 * half; i < kScores; i += 4) {
        if (i % 16 < 4) keep_order();  // eight loads in flight; the compiler would take registers for all
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (first_key + i / 4 * 8 + e >= p_.S) continue;
          const Stored stored = g_key[e * p_.mask.col_stride];
          if constexpr (std::is_same_v<Stored, uint8_t>) {
            if (stored == 0) scores_[i + e] = negative_infinity(0.0f);
          } else {
            scores_[i + e] += to_accumulator(stored);
          }
        }
        g_key = step_pointer(g_key, 8 * p_.mask.col_stride);
      }
    }
  }

  // Dropout of the weights in shared memory, quad by quad of keys, this warp's own 16 rows.
  __device__ __forceinline__ void drop(int block, uint32_t s_weights) {
    const int64_t seed = *p_.dropout.seed;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int i = lane; i < 16 * Tile::kN / 4; i += 32) {
      const int row = row_ - lane / 4 + i / (Tile::kN / 4), key = i % (Tile::kN / 4) * 4;
      const uint32_t s_quad = s_weights + weights_offset(row, key / 8) + key % 8 * sizeof(T);
      Quad<T>& stored = *static_cast<Quad<T>*>(const_cast<void*>(shared_pointer(s_quad)));
      float weights[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) weights[e] = to_accumulator(stored.value[e]);
      drop_quad(weights, p_.dropout, seed, work_.head_of(row), work_.query_of(row), block * Tile::kN + key);
      store_whole_quad(stored.value, weights);
    }
  }

  // Byte offset of 16-byte chunk `chunk` of a row of weights: tiles of 64 keys.
  static __device__ __forceinline__ uint32_t weights_offset(uint32_t row, uint32_t chunk) {
    return chunk / 8 * (Tile::kM * Tile::kStep * sizeof(T)) + swizzled(row, chunk % 8);
  }

  // out_ / sum through this warpgroup's ring, which is drained, to memory; the log-sum-exp.
  __device__ __forceinline__ void store_out() {
    float row_factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum_[half] += __shfl_xor_sync(0xffffffffu, sum_[half], 1);
      sum_[half] += __shfl_xor_sync(0xffffffffu, sum_[half], 2);
      if (threadIdx.x % 4 == 0) shared_.sum[consumer_][row_ + 8 * half] = sum_[half];
    }
    barrier_sync(1, 256);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_ + 8 * half;
      const float sum = shared_.sum[0][row] + shared_.sum[1][row];
      const float keep_scale = p_.dropout.seed != nullptr ? static_cast<float>(p_.dropout.keep_scale) : 1.0f;
      row_factor[half] = sum == 0.0f ? 0.0f : keep_scale / sum;
      if (consumer_ == 0 && threadIdx.x % 4 == 0 && row < work_.rows) {
        static_cast<float*>(
            p_.lse.data)[batch_offset(p_.batch, p_.lse, work_.head_of(row), 0) + work_.query_of(row) * p_.lse.row_stride] =
            sum == 0.0f ? negative_infinity(0.0f) : reference_[half] + natural_log(sum);
      }
    }

    // A warp's 16 rows, padded by 16 bytes so that the eight rows of a store fall into distinct banks.
    constexpr int kCols = Tile::kValueSteps * Tile::kStep, kPitch = kCols + 8;
    static_assert(4 * 16 * kPitch <= Tile::kSlots * Tile::kN * Tile::kStep, "four warps' rows fit into a ring");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    T* s_out = shared_.ring[consumer_][0] + warp * 16 * kPitch;
#pragma unroll
    for (int i = 0; i < kOut; i += 2) {
      const int half = i / 2 % 2;
      *reinterpret_cast<uint32_t*>(s_out + (lane / 4 + 8 * half) * kPitch + i / 4 * 8 + col_) =
          pack_pair<T>(scaled(out_[i], row_factor[half]), scaled(out_[i + 1], row_factor[half]));
    }
    __syncwarp();
    const int first_col = consumer_ * kCols, cols = min(static_cast<int>(p_.Ev) - first_col, kCols);
    for (int i = 0; i < 16; ++i) {
      const int row = warp * 16 + i;
      if (row >= work_.rows) break;
      T* g_row = static_cast<T*>(p_.out.data) + batch_offset(p_.batch, p_.out, work_.head_of(row), 0) +
                 work_.query_of(row) * p_.out.row_stride + first_col * p_.out.col_stride;
      for (int col = lane * 8; col < cols; col += 256) {
        if (p_.out.vector && col + 8 <= cols) {
          *reinterpret_cast<uint4*>(g_row + col) = *reinterpret_cast<const uint4*>(s_out + i * kPitch + col);
        } else {
          for (int e = col; e < min(col + 8, cols); ++e) g_row[e * p_.out.col_stride] = s_out[i * kPitch + e];
        }
      }
    }
  }
  static __device__ __forceinline__ float scaled(float x, float factor) { return factor == 0.0f ? 0.0f : x * factor; }

  const ForwardParams& p_;
  typename Tile::Shared& shared_;
  const FusedWork<Tile>& work_;
  const int consumer_;
  RingPlace<Tile::kSlots> place_;
  int row_, col_;    // of this thread's first element in a 64 x n product; the other row is 8 below
  int last_key_[2];  // that each row sees
  float out_[kOut], scores_[kScores];
  float sum_[2];        // of this thread's own weights, relative to the reference
  float reference_[2];  // that the weights of each row are relative to
};

template <class Tile, bool kGeneral>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    fused_forward_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ FusedMaps maps, int m_tiles,
                         int64_t first_tile) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)  // other cards never launch it
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  typename Tile::Shared& shared = *reinterpret_cast<typename Tile::Shared*>(s_bytes);
  const FusedWork<Tile> work(p, m_tiles, first_tile);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // uniform, as the compiler should know
  if (threadIdx.x == 0) {
    for (int consumer = 0; consumer < Tile::kConsumers; ++consumer) {
      for (int slot = 0; slot < Tile::kSlots; ++slot) {
        mbarrier_init(shared_address(&shared.full[consumer][slot]), 1);
        mbarrier_init(shared_address(&shared.empty[consumer][slot]), 4);
      }
      mbarrier_init(shared_address(&shared.weights_ready[consumer]), 4);
      mbarrier_init(shared_address(&shared.weights_free[consumer]), 4);
    }
    mbarrier_fence_init();
  }
  __syncthreads();
  if (warpgroup == Tile::kConsumers) {
    give_registers<Tile::kProducerRegisters>();
    const int consumer = threadIdx.x / 32 % 4;
    if (consumer < Tile::kConsumers && threadIdx.x % 32 == 0) {
      FusedProducer<Tile>(p, maps, shared, work, consumer).run();
    }
  } else {
    take_registers<Tile::kConsumerRegisters>();
    FusedConsumer<Tile, kGeneral>(p, shared, work, warpgroup).run();
  }
#endif
}

}  // namespace attention_ext
