// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// From Kronecker factors to what preconditions: eigenvectors with eigenvalues, or damped inverses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cortado/status.h"

namespace cortado {

// Memory of the functions below, kept from call to call.
struct InverseScratch {
  std::vector<float> matrix, values;
  std::vector<std::byte> lapack;

  std::int64_t bytes() const;
};

constexpr int kMostRaises = 20;  // of a damping, by ten each

// Of a finite triangle (kfac/triangle.h): eigenvectors as rows of `vectors` (n x n), eigenvalues in ascending order,
// those below 0 as 0. `is_indefinite`: one is below 0 by more than rounding makes it, n eps times the largest. After an
// error the results are as they were.
Status compute_eigenvectors(std::int64_t n, const float* triangle, float* vectors, float* values, bool* is_indefinite,
                            InverseScratch* scratch);

// Of eigenvalues in ascending order as they were found: `values` as above; returns `is_indefinite`.
bool keep_eigenvalues(std::int64_t n, const float* found, float* values);

// The inverse (n x n) of the triangle with `damping` added to its diagonal. If that is not positive definite, ten times
// as much is tried, and so on; `raised` counts how often. After an error the inverse is as it was.
Status compute_damped_inverse(std::int64_t n, const float* triangle, double damping, float* inverse, int* raised,
                              InverseScratch* scratch);

// Mean of the diagonal.
double mean_diagonal(std::int64_t n, const float* triangle);

}  // namespace cortado
