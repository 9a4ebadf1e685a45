// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "kfac/inverse.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/linalg.h"
#include "kfac/triangle.h"

namespace cortado {

namespace {

template <typename T>
T* grown(std::vector<T>* memory, std::size_t elems) {
  if (memory->size() < elems) memory->resize(elems);
  return memory->data();
}

float* grown_matrix(std::int64_t n, InverseScratch* scratch) {
  return grown(&scratch->matrix, static_cast<std::size_t>(n * n));
}

void mirror(std::int64_t n, const float* lower, float* both) {
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t j = 0; j <= i; ++j) both[i * n + j] = both[j * n + i] = lower[i * n + j];
  }
}

}  // namespace

std::int64_t InverseScratch::bytes() const {
  return static_cast<std::int64_t>((matrix.size() + values.size()) * sizeof(float) + lapack.size());
}

Status compute_eigenvectors(std::int64_t n, const float* triangle, float* vectors, float* values, bool* is_indefinite,
                            InverseScratch* scratch) {
  float* matrix = grown_matrix(n, scratch);
  float* found = grown(&scratch->values, static_cast<std::size_t>(n));
  grown(&scratch->lapack, eigen_scratch_bytes(n));
  copy_from_triangle(n, triangle, matrix);
  const Status status = symmetric_eigen(n, matrix, found, scratch->lapack);
  if (!status.ok()) return status;
  std::copy(matrix, matrix + n * n, vectors);
  *is_indefinite = keep_eigenvalues(n, found, values);
  return {};
}

bool keep_eigenvalues(std::int64_t n, const float* found, float* values) {
  for (std::int64_t i = 0; i < n; ++i) values[i] = std::max(found[i], 0.0f);
  const float rounding = static_cast<float>(n) * std::numeric_limits<float>::epsilon();
  return n > 0 && found[0] < -rounding * std::max(found[n - 1], 0.0f);
}

Status compute_damped_inverse(std::int64_t n, const float* triangle, double damping, float* inverse, int* raised,
                              InverseScratch* scratch) {
  float* matrix = grown_matrix(n, scratch);
  Status status;
  for (*raised = 0; *raised <= kMostRaises; ++*raised, damping *= 10) {
    copy_from_triangle(n, triangle, matrix);
    for (std::int64_t i = 0; i < n; ++i) matrix[i * n + i] += static_cast<float>(damping);
    status = invert_positive_definite(n, matrix);
    if (!status.ok()) continue;
    mirror(n, matrix, inverse);
    return {};
  }
  return status;
}

double mean_diagonal(std::int64_t n, const float* triangle) {
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum += static_cast<double>(triangle[triangle_elems(i + 1) - 1]);
  return n == 0 ? 0 : sum / static_cast<double>(n);
}

}  // namespace cortado
