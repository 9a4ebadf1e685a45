// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "core/device.h"

namespace cortado {

// Makes the `rank` vectors of `length` floats at vectors[k * length] orthonormal: modified Gram-Schmidt, every vector
// projected twice. Every rank does this for itself and must get the same bits on any machine, so sums run over 16
// virtual lanes in a fixed tree and nothing is contracted.
//
// A vector that depends on those before it (to kDependent of its length), is zero or is not finite is replaced by a
// random one, keyed by (seed, step, tensor, k), so that the basis keeps its rank; one that still depends after
// kReplacementTries, and when rank > length the surplus vectors, are zero.
struct BasisKey {
  std::uint64_t seed = 0;
  std::uint64_t step = 0;
  std::uint64_t tensor = 0;
};
constexpr float kDependent = 1e-5f;
constexpr int kReplacementTries = 4;
void orthogonalise(float* vectors, std::int64_t length, int rank, const BasisKey& key);

// The same for a row factor (rows x rank, row-major), through `scratch` of rows * rank floats.
void orthogonalise_rows(float* row_factor, std::int64_t rows, int rank, const BasisKey& key, float* scratch);

// The `tensor` of the Philox stream that random vector k comes from, at an attempt: the tensor's own, shifted by both.
CORTADO_HD constexpr std::uint64_t random_vector(const BasisKey& key, int k, int attempt) {
  return key.tensor +
         0x9E3779B97F4A7C15ull * (static_cast<std::uint64_t>(k) * 8 + static_cast<std::uint64_t>(attempt) + 1);
}

// `rank` random vectors, orthonormal: the start of a column basis.
void random_basis(float* vectors, std::int64_t length, int rank, const BasisKey& key);

// col_factor -= transpose(row_basis * overlap of row_factor) in the sense of the two-sided approximation: with
// C = transpose(row_factor) * row_basis, vector k of col_factor loses the sum over l of C[l][k] * col_basis[l]. Row
// factors are rows x rank, column factors rank x cols. Same bits on every machine, as above. `scratch`: 2 * rows * rank
// floats.
struct TwoSided {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  int rank = 0;
  const float* row_basis = nullptr;
  const float* col_basis = nullptr;
};
void remove_overlap(const TwoSided& shape, const float* row_factor, float* col_factor, float* scratch);

}  // namespace cortado
