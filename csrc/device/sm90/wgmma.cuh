// Products of a warpgroup on Tensor Cores (wgmma: sm_90a), one instruction per function.
//
// D (64 x n, float, registers) += A (64 x 16) . B (16 x n), both half types in shared memory. Four consecutive warps issue
// together. A thread of warp w holds row r = 16 w + lane / 4 and row r + 8, of each the columns 8 i + lane % 4 * 2 and the next:
// d[4 i] and d[4 i + 1] are row r's, d[4 i + 2] and d[4 i + 3] row r + 8's.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace attention_ext {

// Shared memory as wgmma sees it: rows of 128 bytes, their eight 16-byte chunks permuted by XOR with the row's number modulo 8
// (what TMA calls a swizzle of 128 bytes), eight rows adjacent. `group_bytes`: from eight rows to the next eight.
// `column_bytes`: from 64 columns to the next 64, where the columns are the product's m or n (k counts rows).
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t s_tile, uint32_t group_bytes, uint32_t column_bytes) {
  constexpr uint64_t kSwizzle128 = 1ull << 62;
  return kSwizzle128 | static_cast<uint64_t>(group_bytes >> 4) << 32 | static_cast<uint64_t>(column_bytes >> 4) << 16 |
         (s_tile & 0x3ffff) >> 4;
}

// Byte offset of 16-byte chunk `chunk` of row `row` in a tile of 128-byte rows.
__device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t chunk) { return row * 128 + ((chunk ^ (row & 7)) * 16); }

// Orders what this warpgroup did with its registers before the products that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }

// Waits until at most kPending of the newest groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of accumulators across a wait that it cannot see them depend on.
template <int kCount>
__device__ __forceinline__ void pin_registers(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
// Likewise of pairs, so that they are packed where they are made and not held as what they are made of.
template <int kCount>
__device__ __forceinline__ void pin_registers(uint32_t (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// D is added to unless `fresh`. kColumnsB: B's n runs along rows of shared memory (k counts rows), else k does; kColumnsA: A's m.
template <class T, bool kColumnsB, bool kColumnsA = false, int kCount>
__device__ __forceinline__ void wgmma(float (&d)[kCount], uint64_t a, uint64_t b, bool fresh = false);

// The instruction for one n. The last two operands of it say whether A and B are transposed.
// clang-format off

#define ATTENTION_EXT_WGMMA(N, TYPE, DESTINATION, A, B, FRESH, COLUMNS_A, COLUMNS_B, ...)                                       \
  asm volatile("{\n.reg .pred add;\nsetp.eq.u32 add, " FRESH ", 0;\n"                                                           \
               "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" DESTINATION "}, " A ", " B                    \
               ", add, 1, 1, " COLUMNS_A ", " COLUMNS_B ";\n}\n"                                                               \
               : __VA_ARGS__                                                                                                    \
               : "l"(a), "l"(b), "r"(static_cast<uint32_t>(fresh)), "n"(kColumnsA), "n"(kColumnsB))

#define ATTENTION_EXT_DESTINATION_64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define ATTENTION_EXT_REGISTERS_64 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])

#define ATTENTION_EXT_DESTINATION_80 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39"
#define ATTENTION_EXT_REGISTERS_80 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])

#define ATTENTION_EXT_DESTINATION_96 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define ATTENTION_EXT_REGISTERS_96 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
  "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])

#define ATTENTION_EXT_DESTINATION_112 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55"
#define ATTENTION_EXT_REGISTERS_112 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
  "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
  "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])

#define ATTENTION_EXT_DESTINATION_128 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define ATTENTION_EXT_REGISTERS_128 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
  "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
  "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
  "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])

#define ATTENTION_EXT_DESTINATION_192 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define ATTENTION_EXT_REGISTERS_192 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
  "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
  "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
  "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), \
  "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), \
  "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), \
  "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), \
  "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])

#define ATTENTION_EXT_DESTINATION_256 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define ATTENTION_EXT_REGISTERS_256 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
  "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
  "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
  "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), \
  "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), \
  "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), \
  "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), \
  "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), \
  "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), \
  "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), \
  "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), \
  "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

template <class T, bool kColumnsB, bool kColumnsA, int kCount>
__device__ __forceinline__ void wgmma(float (&d)[kCount], uint64_t a, uint64_t b, bool fresh) {
  static_assert(kCount == 32 || kCount == 40 || kCount == 48 || kCount == 56 || kCount == 64 || kCount == 96 || kCount == 128,
                "n of 64, 80, 96, 112, 128, 192 or 256");
  constexpr bool kHalf = std::is_same_v<T, __half>;
  if constexpr (kCount == 32 && kHalf)
    ATTENTION_EXT_WGMMA("64", "f16", ATTENTION_EXT_DESTINATION_64, "%32", "%33", "%34", "%35", "%36",
                        ATTENTION_EXT_REGISTERS_64);
  else if constexpr (kCount == 32 && !kHalf)
    ATTENTION_EXT_WGMMA("64", "bf16", ATTENTION_EXT_DESTINATION_64, "%32", "%33", "%34", "%35", "%36",
                        ATTENTION_EXT_REGISTERS_64);
  else if constexpr (kCount == 40 && kHalf)
    ATTENTION_EXT_WGMMA("80", "f16", ATTENTION_EXT_DESTINATION_80, "%40", "%41", "%42", "%43", "%44",
                        ATTENTION_EXT_REGISTERS_80);
  else if constexpr (kCount == 40 && !kHalf)
    ATTENTION_EXT_WGMMA("80", "bf16", ATTENTION_EXT_DESTINATION_80, "%40", "%41", "%42", "%43", "%44",
                        ATTENTION_EXT_REGISTERS_80);
  else if constexpr (kCount == 48 && kHalf)
    ATTENTION_EXT_WGMMA("96", "f16", ATTENTION_EXT_DESTINATION_96, "%48", "%49", "%50", "%51", "%52",
                        ATTENTION_EXT_REGISTERS_96);
  else if constexpr (kCount == 48 && !kHalf)
    ATTENTION_EXT_WGMMA("96", "bf16", ATTENTION_EXT_DESTINATION_96, "%48", "%49", "%50", "%51", "%52",
                        ATTENTION_EXT_REGISTERS_96);
  else if constexpr (kCount == 56 && kHalf)
    ATTENTION_EXT_WGMMA("112", "f16", ATTENTION_EXT_DESTINATION_112, "%56", "%57", "%58", "%59", "%60",
                        ATTENTION_EXT_REGISTERS_112);
  else if constexpr (kCount == 56 && !kHalf)
    ATTENTION_EXT_WGMMA("112", "bf16", ATTENTION_EXT_DESTINATION_112, "%56", "%57", "%58", "%59", "%60",
                        ATTENTION_EXT_REGISTERS_112);
  else if constexpr (kCount == 64 && kHalf)
    ATTENTION_EXT_WGMMA("128", "f16", ATTENTION_EXT_DESTINATION_128, "%64", "%65", "%66", "%67", "%68",
                        ATTENTION_EXT_REGISTERS_128);
  else if constexpr (kCount == 64 && !kHalf)
    ATTENTION_EXT_WGMMA("128", "bf16", ATTENTION_EXT_DESTINATION_128, "%64", "%65", "%66", "%67", "%68",
                        ATTENTION_EXT_REGISTERS_128);
  else if constexpr (kCount == 96 && kHalf)
    ATTENTION_EXT_WGMMA("192", "f16", ATTENTION_EXT_DESTINATION_192, "%96", "%97", "%98", "%99", "%100",
                        ATTENTION_EXT_REGISTERS_192);
  else if constexpr (kCount == 96 && !kHalf)
    ATTENTION_EXT_WGMMA("192", "bf16", ATTENTION_EXT_DESTINATION_192, "%96", "%97", "%98", "%99", "%100",
                        ATTENTION_EXT_REGISTERS_192);
  else if constexpr (kCount == 128 && kHalf)
    ATTENTION_EXT_WGMMA("256", "f16", ATTENTION_EXT_DESTINATION_256, "%128", "%129", "%130", "%131", "%132",
                        ATTENTION_EXT_REGISTERS_256);
  else if constexpr (kCount == 128 && !kHalf)
    ATTENTION_EXT_WGMMA("256", "bf16", ATTENTION_EXT_DESTINATION_256, "%128", "%129", "%130", "%131", "%132",
                        ATTENTION_EXT_REGISTERS_256);
}

// The same with A from registers, as a result's 16 columns lie in them (packed into pairs); B's n runs along rows.
#define ATTENTION_EXT_WGMMA_REGISTERS(N, TYPE, DESTINATION, A, B, FRESH, ...)                                                  \
  asm volatile("{\n.reg .pred add;\nsetp.eq.u32 add, " FRESH ", 0;\n"                                                           \
               "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" DESTINATION "}, {" A "}, " B                  \
               ", add, 1, 1, 1;\n}\n"                                                                                         \
               : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<uint32_t>(fresh)))

template <class T, int kCount>
__device__ __forceinline__ void wgmma_from_registers(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b, bool fresh = false) {
  static_assert(kCount == 32 || kCount == 64, "n of 64 or 128");
  constexpr bool kHalf = std::is_same_v<T, __half>;
  if constexpr (kCount == 32 && kHalf)
    ATTENTION_EXT_WGMMA_REGISTERS("64", "f16", ATTENTION_EXT_DESTINATION_64, "%32, %33, %34, %35", "%36", "%37",
                                  ATTENTION_EXT_REGISTERS_64);
  else if constexpr (kCount == 32 && !kHalf)
    ATTENTION_EXT_WGMMA_REGISTERS("64", "bf16", ATTENTION_EXT_DESTINATION_64, "%32, %33, %34, %35", "%36", "%37",
                                  ATTENTION_EXT_REGISTERS_64);
  else if constexpr (kCount == 64 && kHalf)
    ATTENTION_EXT_WGMMA_REGISTERS("128", "f16", ATTENTION_EXT_DESTINATION_128, "%64, %65, %66, %67", "%68", "%69",
                                  ATTENTION_EXT_REGISTERS_128);
  else if constexpr (kCount == 64 && !kHalf)
    ATTENTION_EXT_WGMMA_REGISTERS("128", "bf16", ATTENTION_EXT_DESTINATION_128, "%64, %65, %66, %67", "%68", "%69",
                                  ATTENTION_EXT_REGISTERS_128);
}

#undef ATTENTION_EXT_WGMMA_REGISTERS
#undef ATTENTION_EXT_DESTINATION_64
#undef ATTENTION_EXT_REGISTERS_64
#undef ATTENTION_EXT_DESTINATION_80
#undef ATTENTION_EXT_DESTINATION_96
#undef ATTENTION_EXT_REGISTERS_96
#undef ATTENTION_EXT_DESTINATION_112
#undef ATTENTION_EXT_REGISTERS_112
#undef ATTENTION_EXT_REGISTERS_80
#undef ATTENTION_EXT_DESTINATION_128
#undef ATTENTION_EXT_REGISTERS_128
#undef ATTENTION_EXT_DESTINATION_192
#undef ATTENTION_EXT_REGISTERS_192
#undef ATTENTION_EXT_DESTINATION_256
#undef ATTENTION_EXT_REGISTERS_256
#undef ATTENTION_EXT_WGMMA
// clang-format on

}  // namespace attention_ext
