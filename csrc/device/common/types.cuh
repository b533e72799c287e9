// Element types: their accumulator, conversions, and reads and writes of four adjacent elements.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace attention_ext {

template <class T>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <class T>
using Accumulator = typename AccumulatorOf<T>::type;

__device__ __forceinline__ float to_accumulator(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_accumulator(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_accumulator(float x) { return x; }
__device__ __forceinline__ double to_accumulator(double x) { return x; }

template <class T>
__device__ __forceinline__ T from_accumulator(Accumulator<T> x);
template <>
__device__ __forceinline__ __half from_accumulator<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_accumulator<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ float from_accumulator<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ double from_accumulator<double>(double x) {
  return x;
}

// Two adjacent elements of a half type as one register, the first one in the low half.
template <class T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack_pair<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ uint32_t pack_pair<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Four adjacent elements as they lie in memory: 8 bytes of half types, 16 of float, 32 of double (two 16-byte
// accesses).
template <class T>
struct alignas(sizeof(T) == 8 ? 16 : 4 * sizeof(T)) Quad {
  T value[4];
};

// Reads the quad at columns [col, col + 4) of a row, zeros from `end` on. `vector`: a quad that lies wholly below `end`
// is aligned and adjacent in memory and is read at once; all else goes element by element, so nothing at or past `end`
// is touched.
template <class T>
__device__ __forceinline__ void load_quad(Accumulator<T> (&out)[4], const T* row, int col, int end, int64_t col_stride,
                                          bool vector) {
  if (vector && col + 4 <= end) {
    const Quad<T> quad = *reinterpret_cast<const Quad<T>*>(row + col);
#pragma unroll
    for (int e = 0; e < 4; ++e) out[e] = to_accumulator(quad.value[e]);
    return;
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    out[e] = 0;
    if (col + e < end) out[e] = to_accumulator(row[(col + e) * col_stride]);
  }
}

// Writes an aligned quad.
template <class T>
__device__ __forceinline__ void store_whole_quad(T* quad_of_row, const Accumulator<T> (&in)[4]) {
  Quad<T> quad;
#pragma unroll
  for (int e = 0; e < 4; ++e) quad.value[e] = from_accumulator<T>(in[e]);
  *reinterpret_cast<Quad<T>*>(quad_of_row) = quad;
}

// Writes the quad at columns [col, col + 4) of a row, nothing from `end` on; `vector` as above.
template <class T>
__device__ __forceinline__ void store_quad(T* row, int col, int end, int64_t col_stride, bool vector,
                                           const Accumulator<T> (&in)[4]) {
  if (vector && col + 4 <= end) return store_whole_quad(row + col, in);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (col + e < end) row[(col + e) * col_stride] = from_accumulator<T>(in[e]);
  }
}

// The same for a row that begins `offset` elements after `data`, of T or, if `wide`, of its accumulator type.
template <class T>
__device__ __forceinline__ void store_quad(void* data, int64_t offset, bool wide, int col, int end, int64_t col_stride,
                                           bool vector, const Accumulator<T> (&in)[4]) {
  if (sizeof(T) == 2 && wide) {
    store_quad(static_cast<Accumulator<T>*>(data) + offset, col, end, col_stride, vector, in);
  } else {
    store_quad(static_cast<T*>(data) + offset, col, end, col_stride, vector, in);
  }
}

}  // namespace attention_ext
