// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The one-pass kernels of low-rank compression (ACP-SGD, section 2.2; Power-SGD, algorithm 1).
//
// READ FIRST: the residual is stored unsubtracted. A pass reads the gradient G and what the residual buffer holds, S,
// and subtracts the product of the factor pair that was sent last while reading, so that
//
//     A = G * gradient_scale + (S - sent.row * sent.col)          S <- A
//
// and the factor of A are made in one sweep over memory: G and S read once, S written once. The residual of the step,
// A - row * col with the pair of this step, is not formed until the next pass reads it (or materialise() is called).
//
// Layouts. Row factor: rows x rank, row-major. Column factor: rank x cols, row-major. All float32.
// The kernels allocate nothing, cannot fail and leave checking to their callers. Gradients and outputs (void*) need no
// alignment; float pointers need that of a float.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cortado/tensor_view.h"

namespace cortado {

// row * col, or nothing at all when rank is 0.
struct FactorPair {
  const float* row = nullptr;
  const float* col = nullptr;
  int rank = 0;
};

struct ResidualPass {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  const void* gradient = nullptr;  // nullptr: A is S - pair (the second round of Power-SGD reads no gradient)
  DType gradient_dtype = DType::kFloat32;
  float gradient_scale = 1.0f;
  const float* residual_in = nullptr;  // S; nullptr: zeros
  float* residual_out = nullptr;       // may equal residual_in; nullptr: A is not kept
  FactorPair sent = {};                // subtracted from residual_in

  // Elements of G from this magnitude on count as not finite, as Inf and NaN do: neither they nor their product with
  // gradient_scale may bring A near overflow.
  float gradient_limit() const { return 1e38f / std::max(1.0f, std::fabs(gradient_scale)); }
};

struct PassResult {
  double sum_squares = 0;  // of A, over its finite elements
  bool finite = true;      // false: an element of G was Inf, NaN or of gradient_limit() and more. Where it was,
                           // residual_out holds residual_in, and the factor's first element is NaN.
};

// row_factor (rows x rank) = A * transpose(col_basis), col_basis being rank x cols.
PassResult project_rows(const ResidualPass& pass, const float* col_basis, int rank, float* row_factor);

// col_factor (rank x cols) = transpose(row_basis) * A, row_basis being rows x rank.
PassResult project_cols(const ResidualPass& pass, const float* row_basis, int rank, float* col_factor);

// Both in one pass: factors.row = A * transpose(bases.col), factors.col = transpose(bases.row) * A.
struct BothBases {
  const float* row = nullptr;
  const float* col = nullptr;
  int rank = 0;
};
struct BothFactors {
  float* row = nullptr;
  float* col = nullptr;
};
PassResult project_both(const ResidualPass& pass, const BothBases& bases, const BothFactors& factors);

// output (rows x cols of `dtype`) = scale * row * col; zeros when the pair's rank is 0. Same bits on every target:
// products are scaled rows times columns, added in the order of k, each operation rounded by itself (but which NaN
// there is, where there is one). `streams`: a large output (core/streaming.h) goes past the caches, if it is float32
// and its rows begin equally far from a cache line.
void reconstruct(const FactorPair& pair, std::int64_t rows, std::int64_t cols, float scale, void* output, DType dtype,
                 bool streams = false);

// residual -= sent.row * sent.col, by the operations of the passes above: a pass over the result with an empty pair
// gives the bits of a pass over the original with the pair.
void materialise(std::int64_t rows, std::int64_t cols, const FactorPair& sent, float* residual);

// Takes back one pass: given the residual_out, the gradient (nullptr: zeros) and the pair of that pass, residual
// becomes the materialised residual before it, to the rounding of one addition (2^-20 of the gradient at most; what is
// smaller than that becomes zero).
void undo_pass(const ResidualPass& pass, float* residual);

}  // namespace cortado
