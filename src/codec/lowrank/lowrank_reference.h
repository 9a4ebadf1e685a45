// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// For tests: what the low-rank kernels compute, in float64 and without cleverness.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "codec/lowrank/lowrank_kernels.h"
#include "core/float16.h"
#include "core/philox.h"

namespace cortado::reference {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;

inline Floats random_floats(std::int64_t elems, std::uint64_t seed) {
  Floats values(static_cast<std::size_t>(elems));
  philox_fill_normal(seed, 0, 0, values.data(), elems);
  return values;
}

// A gradient in its own dtype and the values that it stands for.
struct Gradient {
  Gradient(const Floats& source, DType d) : dtype(d), bytes(source.size() * dtype_bytes(d)), values(source) {
    for (std::size_t i = 0; i < source.size(); ++i) set(i, source[i]);
  }

  void set(std::size_t at, float value) {
    if (dtype == DType::kFloat32) {
      std::memcpy(bytes.data() + at * sizeof(float), &value, sizeof(float));
      values[at] = value;
      return;
    }
    const bool half = dtype == DType::kFloat16;
    const std::uint16_t bits = half ? float_to_fp16(value) : float_to_bf16(value);
    std::memcpy(bytes.data() + at * sizeof(bits), &bits, sizeof(bits));
    values[at] = half ? fp16_to_float(bits) : bf16_to_float(bits);
  }

  const void* data() const { return bytes.data(); }

  DType dtype;
  std::vector<std::byte> bytes;
  Floats values;
};

// a (n x k) * b (k x m)
template <typename A, typename B>
Doubles product(const A& a, const B& b, std::int64_t n, std::int64_t k, std::int64_t m) {
  Doubles result(static_cast<std::size_t>(n * m));
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t l = 0; l < k; ++l) {
      const double factor = a[i * k + l];
      for (std::int64_t j = 0; j < m; ++j) result[i * m + j] += factor * b[l * m + j];
    }
  }
  return result;
}

template <typename A>
A transposed(const A& a, std::int64_t rows, std::int64_t cols) {
  A result(a.size());
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t j = 0; j < cols; ++j) result[j * rows + i] = a[i * cols + j];
  return result;
}

template <typename A>
double sum_squares(const A& a) {
  double sum = 0;
  for (const double value : a) sum += value * value;
  return sum;
}

// |actual - expected| / |expected|; NaN if anything is not finite.
template <typename A>
double relative_error(const A& actual, const Doubles& expected) {
  Doubles difference(expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) difference[i] = actual[i] - expected[i];
  const double norm = sum_squares(expected);
  return std::sqrt(sum_squares(difference) / (norm > 0 ? norm : 1));
}

template <typename A, typename B>
bool same_bytes(const A& a, const B& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0);
}

}  // namespace cortado::reference
