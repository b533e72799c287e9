// The multiplying side of the mask's gradient: one of two consumer warpgroups, which has 64 queries by 128 keys of a tile, sums its
// terms in registers, and writes their sum.
#pragma once

#include "attention/sm90/rows_backward/mask_producer.cuh"
#include "attention/visibility/dropout.cuh"
#include "attention/visibility/score_modifier.cuh"

namespace attention_ext {

// Where a line of a tile's queries or keys lies in the gradient.
template <class Stored>
struct MaskLine {
  Stored* g_data;
  int first, end;  // of a tile's 128, those that exist
  int64_t stride;

  // line: of the tile's rows, where it has rows and columns.
  __device__ __forceinline__ MaskLine(const RowsBackwardParams& p, const MaskTiles& tiles, const MaskItem& item, int line) {
    const MatrixView& view = p.mask_grad;
    const int row = item.row_tile * kMaskTile, key = item.key_tile * kMaskTile;
    const uint32_t n = shared_matrix(p.batch, view, item.matrix, 0u);
    g_data = static_cast<Stored*>(view.data) + batch_offset(p.batch, view, n, 0);
    if (tiles.cols_kept) {
      const int of_line = row + line;
      g_data += of_line * view.row_stride;
      first = key;
      end = of_line < p.L ? static_cast<int>(p.S) : 0;
      stride = view.col_stride;
    } else {
      first = row;
      end = static_cast<int>(p.L);
      stride = view.row_stride;
    }
  }
};

template <class Tile>
class MaskConsumer {
 public:
  using T = typename Tile::T;
  using Stored = typename Tile::Stored;

  __device__ __forceinline__ MaskConsumer(const RowsBackwardParams& p, const MaskTiles& tiles, typename Tile::Shared& shared,
                                          int consumer)
      : p_(p), tiles_(tiles), shared_(shared), consumer_(consumer) {}

  __device__ __forceinline__ void run() {
    uint32_t number = blockIdx.x;
    fetch_bias(MaskItem(tiles_, number));
#pragma unroll 1
    while (true) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) sums_[i] = 0.0f;
#pragma unroll 1
      while (next_term()) {
        step();
        release_term();
      }
      release_term();
      const uint32_t next = number + gridDim.x;
      if (next < tiles_.items) fetch_bias(MaskItem(tiles_, next));  // comes while sums are written and products begin
      store(MaskItem(tiles_, number));
      if (next >= tiles_.items) break;
      number = next;
    }
  }

 private:
  static constexpr int kScores = Tile::kN / 2;
  static constexpr int kPairBytes = 2 * static_cast<int>(sizeof(Stored));

  // Of this thread's first element in the tile; the other row is 8 below. Not held: registers are scarce.
  static __device__ __forceinline__ int own_row() {
    const int thread = static_cast<int>(forget(threadIdx.x));
    return thread / 32 * 16 + thread % 32 / 4;
  }

  // Waits for the next term of the item; false: there is none.
  __device__ __forceinline__ bool next_term() const {
    mbarrier_wait(shared_address(&shared_.term_full[place_.slot]), place_.parity);
    return __shfl_sync(0xffffffffu, shared_.term[place_.slot].row, 0) >= 0;  // uniform, as the compiler should know
  }
  __device__ __forceinline__ void release_term() {
    mbarrier_arrive(shared_address(&shared_.term_empty[place_.slot]));
    place_.advance();
  }
  // The step of the ring so many before the next one.
  __device__ __forceinline__ void release_step(int before) const {
    __syncwarp();
    const int slot = slot_.slot < before ? slot_.slot + Tile::kSlots - before : slot_.slot - before;
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&shared_.empty[slot]));
  }

  // Two values of QueryRecord of this thread's rows. at: of the record, as &QueryRecord::lse.
  __device__ __forceinline__ void of_rows(float (&values)[2], float (QueryRecord::*at)[QueryRecord::kQueries]) const {
    const int row = own_row();
    const QueryRecord& record = shared_.records[place_.slot][row / QueryRecord::kQueries];
#pragma unroll
    for (int half = 0; half < 2; ++half) values[half] = (record.*at)[row % QueryRecord::kQueries + 8 * half];
  }

  // This thread's elements of the mask for all terms of an item, copied to where only this thread reads them.
  __device__ __forceinline__ void fetch_bias(const MaskItem& item) {
    cp_async_wait<0>();  // of an item without terms: two copies to one place come in no order
    const uint32_t n = shared_matrix(p_.batch, p_.mask_grad, item.matrix, 0u);
    const Stored* g_mask = static_cast<const Stored*>(p_.mask.data) + batch_offset(p_.batch, p_.mask, n, 0);
    const int row = item.row_tile * kMaskTile + own_row(), first = item.key_tile * kMaskTile;
    const int last_row = static_cast<int>(p_.L) - 1, last_key = static_cast<int>(p_.S) - 1;
    const auto place = [&](int pair) {
      return reinterpret_cast<Stored*>(&shared_.bias[pair / Tile::kPairs][threadIdx.x]) + pair % Tile::kPairs * 2;
    };
    const auto row_of = [&](int pair) { return g_mask + min(row + pair % 2 * 8, last_row) * p_.mask.row_stride; };
    const auto key_of = [&](int pair) { return first + pair / 2 * 8 + static_cast<int>(threadIdx.x) % 4 * 2; };
    if (p_.mask.vector && first + Tile::kN <= p_.S) {
#pragma unroll 4
      for (int pair = 0; pair < kScores / 2; ++pair) {
        cp_async_few<kPairBytes>(shared_address(place(pair)), row_of(pair) + key_of(pair));
      }
    } else {
#pragma unroll 8
      for (int pair = 0; pair < kScores / 2; ++pair) {
        Stored* to = place(pair);
#pragma unroll
        for (int e = 0; e < 2; ++e) to[e] = row_of(pair)[min(key_of(pair) + e, last_key) * p_.mask.col_stride];
      }
    }
    cp_async_commit();
  }

  // A step of 64 columns of a product, begun. kFirst: of the product. Unless kAlone another one is under way, whose end is awaited.
  template <bool kFirst, bool kAlone>
  __device__ __forceinline__ void multiply_step(float (&d)[kScores]) {
    const int slot = slot_.slot;
    mbarrier_wait(shared_address(&shared_.full[slot]), slot_.parity);
    slot_.advance();
    wgmma_fence();
    const uint64_t a = matrix_descriptor(shared_address(shared_.left[slot]) + consumer_ * 64 * 128, 1024, 0);
    const uint64_t b = matrix_descriptor(shared_address(shared_.right[slot]), 1024, 0);
#pragma unroll
    for (int k = 0; k < Tile::kStep / 16; ++k) wgmma<T, false>(d, a + k * 32 / 16, b + k * 32 / 16, kFirst && k == 0);
    wgmma_commit();
    if constexpr (!kAlone) {
      wgmma_wait<1>();
      release_step(2);
    }
  }
  template <bool kAlone>
  __device__ __forceinline__ void multiply(float (&d)[kScores], int64_t width) {
    multiply_step<true, kAlone>(d);
#pragma unroll 1
    for (int left = mask_steps(width) - 1; left > 0; --left) multiply_step<false, false>(d);
  }

  // S and dP of a term begin | S is there: P | dP is there: the sums.
  __device__ __forceinline__ void step() {
    const MaskTerm& term = shared_.term[place_.slot];
    if (p_.dropout.seed != nullptr) draw(term);  // before products, which leave no registers for it
    float scores[kScores], weight_grads[kScores];
    multiply<true>(scores, p_.E);
    multiply<false>(weight_grads, p_.Ev);
    wgmma_wait<1>();
    pin_registers(scores);
    cp_async_wait<0>();
    make_weights(scores, term);
    wgmma_wait<0>();
    pin_registers(weight_grads);
    release_step(1);

    if (p_.dropout.seed != nullptr) {
#pragma unroll
      for (int part = 0; part < kScores / 32; ++part) {
        const uint32_t kept = shared_.kept[part][threadIdx.x];
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          if ((kept >> i & 1) == 0) weight_grads[part * 32 + i] = 0.0f;
        }
      }
    }
    float factor[] = {Exponents<T>::kUnscale * p_.keep_factor};
    pin_registers(factor);  // the compiler would read it from the parameters each time
    float delta[2];
    of_rows(delta, &QueryRecord::delta);
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      // A weight of 0: whatever a key that is not seen holds.
      if (scores[i] != 0.0f) sums_[i] = fmaf(scores[i], fmaf(weight_grads[i], factor[0], delta[i / 2 % 2]), sums_[i]);
    }
  }

  // Which elements of dP dropout keeps, a bit each.
  __device__ __forceinline__ void draw(const MaskTerm& term) {
    uint32_t kept[kScores / 32] = {};
    visit_kept<kScores>(p_.dropout, term.n, term.row + own_row(), term.key,
                        [&](int i, bool keeps) { kept[i / 32] |= (keeps ? 1u : 0u) << i % 32; });
#pragma unroll
    for (int part = 0; part < kScores / 32; ++part) shared_.kept[part][threadIdx.x] = kept[part];
  }

  // x: products -> P times weight_scale.
  __device__ __forceinline__ void make_weights(float (&x)[kScores], const MaskTerm& term) const {
    float lse[2], offset[2];
    of_rows(lse, &QueryRecord::lse);
    of_rows(offset, &QueryRecord::offset);
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
      if (chunk % 4 == 0) __syncwarp();  // four loads in flight: ptxas would take registers for all
      const uint4 bias = shared_.bias[chunk][threadIdx.x];
      const uint32_t word[4] = {bias.x, bias.y, bias.z, bias.w};
#pragma unroll
      for (int in_chunk = 0; in_chunk < Tile::kPairs; ++in_chunk) {
        const int pair = chunk * Tile::kPairs + in_chunk, half = pair % 2;
        float2 added;
        if constexpr (sizeof(Stored) == 2) {
          added = unpack_pair(word[in_chunk], static_cast<const Stored*>(nullptr));
        } else {
          added = make_float2(__uint_as_float(word[2 * in_chunk]), __uint_as_float(word[2 * in_chunk + 1]));
        }
        // Rounded, as the log-sum-exp was made of scores.
        const float first = __fadd_rn(__fmul_rn(x[2 * pair], p_.scale_factor), added.x);
        const float second = __fadd_rn(__fmul_rn(x[2 * pair + 1], p_.scale_factor), added.y);
        x[2 * pair] = Exponents<T>::weight_of_score(first, lse[half], offset[half]);
        x[2 * pair + 1] = Exponents<T>::weight_of_score(second, lse[half], offset[half]);
      }
    }
    // A warpgroup's first query sees the fewest keys.
    const KeyRange range = term.range(p_);
    if (term.key + Tile::kN <= range.end_of_row(term.row + consumer_ * 64)) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int seen = range.end_of_row(term.row + own_row() + 8 * half) - term.key - static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
      for (int i = 2 * half; i < kScores; i += 4) {
        if (i / 4 * 8 >= seen) x[i] = 0.0f;
        if (i / 4 * 8 + 1 >= seen) x[i + 1] = 0.0f;
      }
    }
  }

  // Of one row or column a line; of both a tile, rounded, or in float for the sums.
  __device__ __forceinline__ void store(const MaskItem& item) {
    if (!tiles_.rows_kept || !tiles_.cols_kept) {
      store_line(item);
    } else if (tiles_.parts != nullptr) {
      float* g_part = tiles_.parts + (static_cast<int64_t>(item.tile) * tiles_.splits + item.split) * (kMaskTile * kMaskTile) +
                      own_row() * kMaskTile + threadIdx.x % 4 * 2;
#pragma unroll
      for (int i = 0; i < kScores; i += 2) {
        *reinterpret_cast<float2*>(g_part + i / 2 % 2 * 8 * kMaskTile + i / 4 * 8) = make_float2(sums_[i], sums_[i + 1]);
      }
    } else {
      store_tile(item);
    }
  }

  __device__ __forceinline__ void store_tile(const MaskItem& item) const {
    const MatrixView& view = p_.mask_grad;
    const int warp_row = consumer_ * 64 + threadIdx.x / 32 % 4 * 16;
    const MaskLine<Stored> line(p_, tiles_, item, 0);
    const int rows = static_cast<int>(p_.L) - item.row_tile * kMaskTile - warp_row, S = static_cast<int>(p_.S);
    if constexpr (Tile::kStrips) {
      Stored* g_row = line.g_data + warp_row * view.row_stride;
#pragma unroll
      for (int part = 0; part < kScores / 32; ++part) {
        float values[32];
#pragma unroll
        for (int i = 0; i < 32; ++i) values[i] = sums_[part * 32 + i];
        for_each_chunk<Stored, 4>(values, shared_address(shared_.strip[threadIdx.x / 32]),
                                  [&](int row, int col, const Stored* chunk) {
                                    const int key = line.first + part * 64 + col;
                                    if (row < rows && key < S) store_chunk(g_row + row * view.row_stride, key, S, view, chunk);
                                  });
      }
    } else {
      const int row = threadIdx.x % 32 / 4;
      Stored* g_row = line.g_data + (warp_row + row) * view.row_stride;
#pragma unroll
      for (int i = 0; i < kScores; i += 2) {
        const int below = i / 2 % 2 * 8, key = line.first + i / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2;
        if (row + below >= rows) continue;
        Stored* g_pair = g_row + below * view.row_stride + key * view.col_stride;
        if (view.vector && key + 2 <= S) {
          *reinterpret_cast<float2*>(g_pair) = make_float2(sums_[i], sums_[i + 1]);
        } else {
          if (key < S) g_pair[0] = sums_[i];
          if (key + 1 < S) g_pair[view.col_stride] = sums_[i + 1];
        }
      }
    }
  }

  // The sums of the tile's rows, or of its columns, by way of shared memory.
  __device__ __forceinline__ void store_line(const MaskItem& item) {
    barrier_sync(kBarrierRowsOwn, Tile::kConsumerThreads);  // the line before has been read
    if (tiles_.rows_kept) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 2 * half; i < kScores; i += 4) sum += sums_[i] + sums_[i + 1];
        sum = warp_sum<4>(sum);
        if (threadIdx.x % 4 == 0) shared_.lines[0][own_row() + 8 * half] = sum;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float sum = sums_[i + e] + sums_[i + 2 + e];
#pragma unroll
          for (int lanes = 16; lanes >= 4; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
          if (threadIdx.x % 32 < 4) shared_.lines[threadIdx.x / 32][i / 4 * 8 + threadIdx.x % 4 * 2 + e] = sum;
        }
      }
    }
    barrier_sync(kBarrierRowsOwn, Tile::kConsumerThreads);  // this one is there
    const int at = static_cast<int>(threadIdx.x);
    if (at >= kMaskTile) return;
    float sum = shared_.lines[0][at];
#pragma unroll
    for (int warp = 1; warp < kRowsBackwardConsumers * 4; ++warp) {
      if (!tiles_.rows_kept) sum += shared_.lines[warp][at];
    }
    if (tiles_.parts != nullptr) {
      tiles_.parts[(static_cast<int64_t>(item.tile) * tiles_.splits + item.split) * kMaskTile + at] = sum;
    } else {
      const MaskLine<Stored> line(p_, tiles_, item, 0);
      if (line.first + at < line.end) line.g_data[(line.first + at) * line.stride] = from_accumulator<Stored>(sum);
    }
  }

  const RowsBackwardParams& p_;
  const MaskTiles& tiles_;
  typename Tile::Shared& shared_;
  const int consumer_;
  RingPlace<Tile::kSlots> slot_;
  RingPlace<Tile::kPlaces> place_;  // of the term
  float sums_[kScores];
};

}  // namespace attention_ext
