// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Dense linear algebra of K-FAC over BLAS and LAPACK (OpenBLAS). Matrices are float32, row-major and without gaps; of a
// symmetric one only the lower triangle is read, unless said otherwise.
//
// BLAS may use other instructions on another kind of machine, so results are the same bytes on machines of one kind
// only. BLAS's own threads are not used: whoever wants several calls this from several.
//
// Functions that return nothing are kernels: dimensions are from 0 to kMaxMatrixDim (rows and columns that are summed
// over may be more, up to 2^31 - 1), what is written overlaps nothing else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cortado/status.h"

namespace cortado {

// The workspace of LAPACK's eigensolver, 2 n^2 + 6 n + 1 values, is counted in 32 bits.
constexpr std::int64_t kMaxMatrixDim = 32764;

enum class Operand : std::uint8_t { kAsIs, kTransposed };

// c = op(a) op(b): m x n, from m x k and k x n after op.
void multiply(Operand op_a, Operand op_b, std::int64_t m, std::int64_t n, std::int64_t k, const float* a,
              const float* b, float* c);

// Lower triangle of c (n x n, rows `c_stride` apart) += alpha times the products of all pairs
//   add_row_products:    of rows of x (n x k):    x x^T
//   add_column_products: of columns of x (k x n): x^T x
void add_row_products(std::int64_t n, std::int64_t k, float alpha, const float* x, float* c, std::int64_t c_stride);
void add_column_products(std::int64_t n, std::int64_t k, float alpha, const float* x, float* c, std::int64_t c_stride);

// Scratch of symmetric_eigen, in bytes; alignment of a float is enough.
std::uint64_t eigen_scratch_bytes(std::int64_t n);

// Eigenvalues in ascending order to `values`; eigenvector i becomes row i of `matrix`, so matrix^T diag(values) matrix
// is what it was. kInternal if the iteration does not converge; then `matrix` holds unspecified values.
Status symmetric_eigen(std::int64_t n, float* matrix, float* values, std::span<std::byte> scratch);

// The inverse of a positive definite matrix, by Cholesky decomposition, to its lower triangle. kFailedPrecondition if
// it is not positive definite; then the triangle holds unspecified values.
Status invert_positive_definite(std::int64_t n, float* matrix);

}  // namespace cortado
