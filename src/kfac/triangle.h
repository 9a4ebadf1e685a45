// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Symmetric matrices as they are kept and sent: the lower triangle row by row, (0,0) (1,0) (1,1) (2,0) ...
#pragma once

#include <cstdint>
#include <cstring>

namespace cortado {

constexpr std::int64_t triangle_elems(std::int64_t n) { return n * (n + 1) / 2; }

// triangle += lower triangle of the n x n `matrix`.
inline void add_to_triangle(std::int64_t n, const float* matrix, float* triangle) {
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t j = 0; j <= i; ++j) triangle[j] += matrix[i * n + j];
    triangle += i + 1;
  }
}

inline void copy_to_triangle(std::int64_t n, const float* matrix, float* triangle) {
  for (std::int64_t i = 0; i < n; triangle += ++i) {
    std::memcpy(triangle, matrix + i * n, static_cast<std::size_t>(i + 1) * sizeof(float));
  }
}

// Both triangles of `matrix`.
inline void copy_from_triangle(std::int64_t n, const float* triangle, float* matrix) {
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t j = 0; j <= i; ++j) matrix[i * n + j] = matrix[j * n + i] = triangle[j];
    triangle += i + 1;
  }
}

inline void set_identity_triangle(std::int64_t n, float* triangle) {
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t j = 0; j <= i; ++j) *triangle++ = i == j ? 1.0f : 0.0f;
  }
}

inline void set_identity(std::int64_t n, float* matrix) {
  std::memset(matrix, 0, static_cast<std::size_t>(n * n) * sizeof(float));
  for (std::int64_t i = 0; i < n; ++i) matrix[i * n + i] = 1.0f;
}

}  // namespace cortado
