// Batch normalisation on the CPU, of a contiguous matrix (rows, cols):
//   out = scale * ((input - mean) / sqrt(var + eps) * weight + bias)
// by one factor after the other, in one pass. It subtracts before it multiplies: a small variance next to a large mean stays exact,
// where PyTorch's batch_norm, which multiplies first, loses it.
//
// Parallel: parallel(begin, end, grain, f) calls f(first, last) for parts of [begin, end), of `grain` at least, in any threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/arithmetic.h"

namespace attention_ext {

constexpr int64_t kElementsOfThread = 32768;  // fewer are not worth a thread; PyTorch's own number

// A number for each column, one for all (stride 0), or none (null).
template <class T>
struct PerColumn {
  const T* data = nullptr;
  int64_t stride = 0;
};

template <class T>
struct BatchNormCpu {
  int64_t rows, cols;
  const T* input;
  T* out;
  T* mean;  // (cols,)
  T* var;   // (cols,)
  PerColumn<T> weight, bias, scale;
  double eps;
};

// Mean and biased variance of the columns, in double: of pieces of rows, the same pieces whatever the threads, then of all. A
// piece's numbers are summed less the first of them. That is one of them: the variance of n is at least 1 / n of its squared
// distance to the mean, and what cancels costs at most n roundings. A job takes one piece of a strip of columns, whose sums stay
// in the first cache, four rows at a time.
template <class T, class Parallel>
void column_statistics(const BatchNormCpu<T>& p, const Parallel& parallel) {
  if (p.rows == 0 || p.cols == 0) {
    std::fill_n(p.mean, p.cols, std::numeric_limits<T>::quiet_NaN());
    std::fill_n(p.var, p.cols, std::numeric_limits<T>::quiet_NaN());
    return;
  }
  constexpr int64_t kStrip = 128, kRows = 128, kMostPieces = 64;
  const int64_t piece = std::max(kRows, ceil_div(p.rows, kMostPieces)), pieces = ceil_div(p.rows, piece);
  const int64_t strips = ceil_div(p.cols, kStrip), cols = p.cols;
  std::vector<double> means(pieces * cols), squares(pieces * cols);
  const auto count = [&](int64_t of) { return std::min(piece, p.rows - of * piece); };
  const auto job = [&](int64_t of, int64_t first) {
    const int64_t width = std::min(kStrip, cols - first), rows = count(of);
    const T* in = p.input + of * piece * cols + first;
    double origin[kStrip], sum[kStrip] = {}, square[kStrip] = {};
    for (int64_t col = 0; col < width; ++col) origin[col] = std::isfinite(in[col]) ? in[col] : T{0};
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) {
      const T *a = in + row * cols, *b = a + cols, *c = b + cols, *d = c + cols;
      for (int64_t col = 0; col < width; ++col) {
        const double w = a[col] - origin[col], x = b[col] - origin[col], y = c[col] - origin[col], z = d[col] - origin[col];
        sum[col] += (w + x) + (y + z);
        square[col] += (w * w + x * x) + (y * y + z * z);
      }
    }
    for (; row < rows; ++row) {
      for (int64_t col = 0; col < width; ++col) {
        const double apart = in[row * cols + col] - origin[col];
        sum[col] += apart;
        square[col] += apart * apart;
      }
    }
    for (int64_t col = 0; col < width; ++col) {
      const double mean = sum[col] / static_cast<double>(rows), spread = square[col] - mean * sum[col];
      means[of * cols + first + col] = origin[col] + mean;
      squares[of * cols + first + col] = spread < 0.0 ? 0.0 : spread;  // NaN stays
    }
  };
  const int64_t grain = std::max<int64_t>(kElementsOfThread / (piece * std::min(kStrip, cols)), 1);
  parallel(0, pieces * strips, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) job(i / strips, i % strips * kStrip);
  });
  const double all = static_cast<double>(p.rows);
  for (int64_t col = 0; col < cols; ++col) {
    double mean = means[col], square = squares[col];
    if (pieces > 1) {
      mean = 0.0;
      for (int64_t of = 0; of < pieces; ++of) mean += means[of * cols + col] * (static_cast<double>(count(of)) / all);
      for (int64_t of = 0; of < pieces; ++of) {
        const double apart = means[of * cols + col] - mean;
        square += (of > 0 ? squares[of * cols + col] : 0.0) + static_cast<double>(count(of)) * apart * apart;
      }
    }
    p.mean[col] = static_cast<T>(mean);
    p.var[col] = static_cast<T>(square / all);
  }
}

template <class T, class Parallel>
void normalise(const BatchNormCpu<T>& p, const Parallel& parallel) {
  const int64_t cols = p.cols;
  const auto gather = [&](const PerColumn<T>& from) {
    std::vector<T> own(from.data == nullptr ? 0 : cols);
    for (size_t col = 0; col < own.size(); ++col) own[col] = from.data[static_cast<int64_t>(col) * from.stride];
    return own;
  };
  const bool scales = p.scale.stride != 0 || *p.scale.data != T{1};
  const std::vector<T> weight = gather(p.weight), bias = gather(p.bias), scale = gather(scales ? p.scale : PerColumn<T>{});
  std::vector<T> factor(cols);
  for (int64_t col = 0; col < cols; ++col) factor[col] = T{1} / std::sqrt(p.var[col] + static_cast<T>(p.eps));
  parallel(0, p.rows, std::max<int64_t>(kElementsOfThread / std::max<int64_t>(cols, 1), 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* __restrict in = p.input + row * cols, * __restrict mean = p.mean;
      T* __restrict out = p.out + row * cols;
      for (int64_t col = 0; col < cols; ++col) out[col] = (in[col] - mean[col]) * factor[col];
      for (size_t col = 0; col < weight.size(); ++col) out[col] *= weight[col];
      for (size_t col = 0; col < bias.size(); ++col) out[col] += bias[col];
      for (size_t col = 0; col < scale.size(); ++col) out[col] *= scale[col];
    }
  });
}

}  // namespace attention_ext
