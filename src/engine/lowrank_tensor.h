// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// LowRankTensor: what one compressed matrix keeps between steps, and the changes a step makes to it.
//
// A step first only writes to places that the step before does not need any more (the local factors, the received
// factor, and, in place, the residual); commit() makes them the new state, rollback() takes the residual's change back.
// So until commit the state before the step can be had again:
//
//   row_basis, col_basis   orthonormal factors; a step that sends the row factor projects on col_basis and the reverse
//   row_local, col_local   the factors this rank computed last, as they were rounded for the wire
//   sent                   the pair still to be subtracted from `residual` (lowrank_kernels.h)
//   received               the summed factor of this step, made orthonormal when it arrives
//
// ACP-SGD (section 2.2):  P-step: row_local = A col_basis^T,  next row_basis = orth(sum of row_local)
//                         Q-step: col_local = A^T row_basis,  next col_basis = orth(sum of col_local)
// Power-SGD (algorithm 1): round 0: row_local = A col_basis^T, then row_local = orth(sum)
//                          round 1: col_fresh = A^T row_local, next col_basis = the sum
#pragma once

#include <cstdint>
#include <string>

#include "bucket/layout.h"
#include "codec/lowrank/lowrank_kernels.h"
#include "codec/lowrank/orthogonalise.h"
#include "core/aligned_buffer.h"
#include "cortado/engine.h"

namespace cortado {

class LowRankTensor {
 public:
  struct Setup {
    std::int64_t rows = 0;
    std::int64_t cols = 0;
    int rank = 0;
    DType dtype = DType::kFloat32;
    DType wire = DType::kFloat32;
    int world_size = 1;
    bool two_rounds = false;  // Power-SGD
    bool warm_start = true;
    BasisKey key;
  };
  explicit LowRankTensor(const Setup& setup);

  // `residual`: rows * cols floats, zeroed; nullptr without error feedback. `spare`: as many, or nullptr; with it a
  // rollback is bit-exact.
  void set_residual(float* residual, float* spare);

  // Reads the gradient, updates the residual and writes the factor of `side` to `slot` in the wire's dtype. Returns
  // false if the gradient was not finite.
  bool encode(SlotKind side, const void* gradient, double gradient_scale, void* slot);

  // Power-SGD, between the rounds: the summed row factor becomes the orthonormal basis of round 1, and round 1's factor
  // is written to `slot`.
  void receive_first_round(const void* summed, std::int64_t step);
  bool encode_second_round(void* slot);

  // output = the mean of the gradients that the summed factor stands for, in the gradient's dtype.
  void decode(SlotKind side, const void* summed, double gradient_scale, void* output);

  // Keeps the summed factor and makes it orthonormal (ACP-SGD), for the next step.
  void receive(SlotKind side, const void* summed, std::int64_t step);

  void commit(SlotKind side);
  // The gradient as encode() read it (nullptr: zeros); needed unless there is a spare residual.
  void rollback(const void* gradient);

  // The residual itself, without a pair pending.
  void materialise_residual();
  const float* residual() const { return residual_; }
  float* residual() { return residual_; }

  // The factor the next step projects on, `side` being what it sends.
  float* basis(SlotKind side) { return side == SlotKind::kRowFactor ? col_basis_.data() : row_basis_.data(); }
  std::int64_t basis_elems(SlotKind side) const {
    return (side == SlotKind::kRowFactor ? setup_.cols : setup_.rows) * setup_.rank;
  }

  const Setup& setup() const { return setup_; }
  std::int64_t factor_bytes() const;
  double sum_squares() const { return sum_squares_; }      // of A in the last step
  double error_squares() const { return error_squares_; }  // of A minus its own reconstruction

 private:
  std::int64_t factor_elems() const { return std::max(setup_.rows, setup_.cols) * setup_.rank; }
  std::int64_t slot_elems(SlotKind side) const {
    return (side == SlotKind::kRowFactor ? setup_.rows : setup_.cols) * setup_.rank;
  }
  const float* widen(const void* summed, std::int64_t elems, float* widened) const;
  double write_slot(float* factor, std::int64_t elems, void* slot) const;
  void measure(const PassResult& pass, const float* factor, std::int64_t elems, double wire_error_squares);
  float wire_scale() const;

  Setup setup_;
  float* residual_ = nullptr;
  float* spare_ = nullptr;
  FactorPair sent_;
  ResidualPass pass_;  // of the step in hand
  AlignedBuffer<float> row_basis_, row_local_, col_basis_, col_local_, col_fresh_, received_, scratch_;
  bool first_round_finite_ = true;
  double sum_squares_ = 0;
  double error_squares_ = 0;
};

}  // namespace cortado
