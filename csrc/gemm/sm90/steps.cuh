// The steps of a product by wgmma for kernels that multiply several things in turn: C[kM, kN] = sum over k of A[m, k] * B[k, n],
// 64 in k a step, from a ring of buffers that one thread fills with TMA.
//
// Of each operand either k runs along rows of 128 bytes as they lie in shared memory, or rows count k: then m or n runs along
// them (kColumnsA, kColumnsB), and wgmma transposes as it reads. A stage's A is two boxes of 64 x 64, one for each warpgroup,
// either way; its B is one box of kN rows, or kN / 64 boxes of 64 rows of k.
#pragma once

#include "device/sm80/cp_async.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tma.cuh"
#include "device/sm90/warpgroup.cuh"
#include "device/sm90/wgmma.cuh"
#include "gemm/sm90/clear_rows.cuh"
#include "gemm/sm90/mainloop.cuh"
#include "gemm/sm90/tile.cuh"

namespace attention_ext {

constexpr int kStepBoxBytes = 8192;  // of 64 x 64 elements

// What loads: one thread.
template <class Tile>
class StepLoader {
 public:
  __device__ __forceinline__ explicit StepLoader(typename Tile::Shared& shared) : shared_(shared) {}

  // Of a tile so many steps will be loaded: kAhead of them before the last, or at once, the next tile is asked for (tickets.cuh).
  __device__ __forceinline__ void expect(int steps) {
    left_ = steps;
    if (steps <= kAhead) ask();
  }

  // Steps of both operands along k: from the box at `a` or, with kColumnsA, that and the one 64 elements of m after it; of B
  // likewise. The half terms of float operands are the innermost batch dim. kBlocksA: A's columns lie in blocks of 64, which are
  // the batch dim after that one.
  template <bool kColumnsA, bool kColumnsB, bool kBlocksA = false>
  __device__ __forceinline__ void load(const CUtensorMap& map_a, TensorPosition a, const CUtensorMap& map_b, TensorPosition b,
                                       int steps) {
    using T = typename Tile::T;
#pragma unroll 1
    for (; steps > 0; --steps) {
      if (--left_ == kAhead) ask();
      mbarrier_wait(shared_address(&shared_.empty[ring_.slot]), ring_.parity ^ 1);
      const uint32_t full = shared_address(&shared_.full[ring_.slot]);
      mbarrier_arrive_expect_bytes(full, Tile::kTerms * (Tile::kM + Tile::kN) * Tile::kK * sizeof(T));
#pragma unroll
      for (int term = 0; term < Tile::kTerms; ++term) {
        if constexpr (Tile::kTerms == 2) a.at[2] = b.at[2] = term;
        load_boxes<kColumnsA, kBlocksA, Tile::kM / 64>(shared_address(shared_.stage[ring_.slot].a[term]), map_a, a, full);
        load_boxes<kColumnsB, false, Tile::kN / 64>(shared_address(shared_.stage[ring_.slot].b[term]), map_b, b, full);
      }
      step<kColumnsA, kBlocksA>(a);
      step<kColumnsB, false>(b);
      ring_.advance();
    }
  }

 private:
  // As long as it takes to draw a number and to find its place, about 3000 cycles. Who draws earlier takes tiles that others could
  // begin sooner.
  static constexpr int kAhead = 6;
  __device__ __forceinline__ void ask() { mbarrier_arrive(shared_address(&shared_.wanted)); }

  // kColumns: `boxes` boxes of 64 rows of k, next to each other; else one box of boxes * 64 rows.
  template <bool kColumns, bool kBlocks, int kBoxes>
  static __device__ __forceinline__ void load_boxes(uint32_t s_dst, const CUtensorMap& map, TensorPosition box, uint32_t full) {
#pragma unroll
    for (int i = 0; i < (kColumns ? kBoxes : 1); ++i) {
      tma_load(s_dst + i * kStepBoxBytes, &map, box, full);
      next_columns<kBlocks>(box);
    }
  }
  template <bool kColumns, bool kBlocks>
  static __device__ __forceinline__ void step(TensorPosition& at) {
    if constexpr (kColumns) {
      at.at[1] += Tile::kK;
    } else {
      next_columns<kBlocks>(at);
    }
  }
  template <bool kBlocks>
  static __device__ __forceinline__ void next_columns(TensorPosition& at) {
    static_assert(Tile::kK == 64, "as many columns as a box has");
    at.at[kBlocks ? 3 : 0] += kBlocks ? 1 : 64;
  }

  typename Tile::Shared& shared_;
  RingPlace<Tile::kStages> ring_;
  int left_ = 0;  // steps of the tile
};

// What multiplies: one of the two warpgroups, `consumer`.
template <class Tile>
class StepMultiplier {
 public:
  // The second warpgroup stays kSkew steps later than the first, as in mainloop.cuh.
  __device__ __forceinline__ StepMultiplier(typename Tile::Shared& shared, int consumer)
      : shared_(shared), consumer_(consumer), leads_(consumer == 0) {
    if (!leads_) barrier_sync(kBarrierSkew, 128 * Tile::kConsumers);
  }
  // Lets the other go where there is nothing to multiply: at a tile without a step, since the other may have to take part in what
  // brings the next tile, and at the end of the kernel.
  __device__ __forceinline__ void let_follow() {
    if (leads_) barrier_sync(kBarrierSkew, 128 * Tile::kConsumers);
    leads_ = false;
  }

  // product = A . B over so many steps, at least one. last_rows: with kColumnsB, the rows of B that count in the last step.
  template <bool kColumnsA, bool kColumnsB>
  __device__ __forceinline__ void multiply(float (&product)[Tile::kN / 2], int steps, int last_rows = Tile::kK) {
    // The first step by code of its own, in which the compiler sees that what `product` held before is not read: its registers are
    // free from its last use on.
    int previous = ring_.slot;
    begin_step<kColumnsB>(steps == 1 ? last_rows : Tile::kK);
    multiply_step<kColumnsA, kColumnsB, true>(product);
    end_step(0, steps);
#pragma unroll 1
    for (int step = 1; step < steps; ++step) {
      begin_step<kColumnsB>(step == steps - 1 ? last_rows : Tile::kK);
      multiply_step<kColumnsA, kColumnsB, false>(product);
      wgmma_wait<1>();  // the step before this one is done
      release(previous);
      previous = ring_.slot;
      end_step(step, steps);
    }
    wgmma_wait<0>();
    pin_registers(product);
    release(previous);
  }

  // product += A . B of two terms each, in parts that `promotion` adds (mainloop.cuh).
  template <bool kColumnsA, bool kColumnsB, class Promotion>
  __device__ __forceinline__ void multiply_terms(float (&product)[Tile::kN / 2], int steps, Promotion& promotion) {
    static_assert(Tile::kTerms == 2, "high and low");
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      begin_step<false>(Tile::kK);
#pragma unroll
      for (int k = 0; k < Tile::kK; k += Tile::kPromoted) {
        const bool last = k + Tile::kPromoted == Tile::kK;
        float part[Tile::kN / 2];
        wgmma_fence();
        multiply_part<kColumnsA, kColumnsB, Tile::kPromoted>(part, 1, 0, true, k);  // the small ones first
        multiply_part<kColumnsA, kColumnsB, Tile::kPromoted>(part, 0, 1, false, k);
        multiply_part<kColumnsA, kColumnsB, Tile::kPromoted>(part, 0, 0, false, k);
        wgmma_commit();
        if (k == 0) promotion.begin_step(step, product);
        if (last && (step == Tile::kSkew - 1 || step == steps - 1)) let_follow();
        wgmma_wait<0>();
        pin_registers(part);
        if (last) release(ring_.slot);
        promotion.add(product, part);
      }
      ring_.advance();
    }
  }

 private:
  // Waits for the operands; rows of B from `rows` on are made zero.
  template <bool kColumnsB>
  __device__ __forceinline__ void begin_step(int rows) {
    mbarrier_wait(shared_address(&shared_.full[ring_.slot]), ring_.parity);
    if (kColumnsB && rows < Tile::kK) {
      clear_rows(shared_address(shared_.stage[ring_.slot].b[0]), Tile::kColumnBoxes, Tile::kK, rows, kBarrierRows + consumer_);
    }
  }
  __device__ __forceinline__ void end_step(int step, int steps) {
    if (step == Tile::kSkew - 1 || step == steps - 1) let_follow();
    ring_.advance();
  }
  template <bool kColumnsA, bool kColumnsB, bool kFresh>
  __device__ __forceinline__ void multiply_step(float (&product)[Tile::kN / 2]) {
    wgmma_fence();
    multiply_part<kColumnsA, kColumnsB, Tile::kK>(product, 0, 0, kFresh, 0);
    wgmma_commit();
  }
  // sums += A's term . B's term over `kCount` of the step's k, from `begin` on.
  template <bool kColumnsA, bool kColumnsB, int kCount>
  __device__ __forceinline__ void multiply_part(float (&sums)[Tile::kN / 2], int term_a, int term_b, bool fresh, int begin) {
    using T = typename Tile::T;
    typename Tile::Stage& stage = shared_.stage[ring_.slot];
    const uint64_t a = matrix_descriptor(shared_address(stage.a[term_a]) + consumer_ * kStepBoxBytes, 1024, kStepBoxBytes);
    const uint64_t b = matrix_descriptor(shared_address(stage.b[term_b]), 1024, kStepBoxBytes);
#pragma unroll
    for (int k = begin; k < begin + kCount; k += 16) {
      constexpr int kAlong = sizeof(T), kDown = 128;  // bytes from one k to the next
      wgmma<T, kColumnsB, kColumnsA>(sums, a + k * (kColumnsA ? kDown : kAlong) / 16, b + k * (kColumnsB ? kDown : kAlong) / 16,
                                     fresh && k == begin);
    }
  }
  __device__ __forceinline__ void release(int slot) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&shared_.empty[slot]));
  }

  typename Tile::Shared& shared_;
  RingPlace<Tile::kStages> ring_;
  int consumer_;
  bool leads_;
};

// The first of a thread's two rows of a tile, `row` and `row` + 8, and its warp's strip: computed anew at each use, for code that
// has no registers to hold them.
__device__ __forceinline__ int row_anew() {
  const unsigned thread = forget(threadIdx.x);
  return static_cast<int>(thread / 32 * 16 + thread % 32 / 4);
}
template <class Tile>
__device__ __forceinline__ uint32_t strip_anew(typename Tile::Shared& shared) {
  return Tile::strip_address(shared, static_cast<int>(forget(threadIdx.x) / 32));
}

// A kernel of Tile::kThreads: load(loader) in one thread, multiply(multiplier, s_strip, row) in the two warpgroups, each with its
// registers, and plan() in one more thread of the warpgroup that loads. s_strip: a warp's own 16 rows of 128 bytes; row: the first
// of the thread's two rows of a tile, `row` and `row` + 8.
template <class Tile, class Load, class Multiply, class Plan = NothingToDo>
__device__ __forceinline__ void run_warpgroups(typename Tile::Shared& shared, Load load, Multiply multiply, Plan plan = {}) {
  split_warpgroups<Tile>(
      shared,
      [&] {
        StepLoader<Tile> loader(shared);
        load(loader);
      },
      [&](int consumer) {
        StepMultiplier<Tile> multiplier(shared, consumer);
        const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);  // uniform, as the compiler should know
        multiply(multiplier, Tile::strip_address(shared, consumer * 4 + warp),
                 consumer * 64 + warp * 16 + static_cast<int>(threadIdx.x % 32 / 4));
        multiplier.let_follow();
      },
      plan);
}

}  // namespace attention_ext
