// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Both factors in every step, of half the rank each, so that a step sends the bytes of ACP-SGD's mean step. With
// orthonormal bases R (rows x r) and C (r x cols) that the step before gave:
//
//   P = A C^T,  Q = R^T A  (sent in one message)         A ~ P C + R (Q - (R^T P) C) = [P R] [C ; Q - (R^T P) C]
//   next R = orth(sum of P),  next C = orth(sum of Q)
//
// The approximation is A projected on the rows' basis or the columns', of rank 2r. Nothing waits for a collective of
// the same step. Why: docs/results/quality.md and docs/adr/0014-two-sided.md.
#pragma once

#include "engine/lowrank_tensor.h"

namespace cortado {

class TwoSidedTensor final : public LowRankTensor {
 public:
  explicit TwoSidedTensor(const Setup& setup);
  bool finish_encode(SlotKind kind, const PassResult& result, void* slot) override;
  std::optional<FactorPair> mean(SlotKind kind, const void* summed) override;
  void receive(SlotKind kind, const void* summed, std::int64_t step) override;
  void commit(SlotKind kind) override;
  std::span<float> basis(SlotKind) override { return bases_.span(); }
  std::int64_t factor_bytes() const override;

 private:
  Projection projection(SlotKind kind) override;
  // [P R] and [C ; Q - (R^T P) C].
  struct Pair {
    AlignedBuffer<float> row, col;
  };
  float* row_basis() { return bases_.data(); }
  float* col_basis() { return bases_.data() + row_elems(); }
  // Fills `pair` from factors_, P and then Q, which are used up.
  FactorPair join(Pair* pair);

  AlignedBuffer<float> bases_;     // R, then C; the same on every rank
  AlignedBuffer<float> received_;  // the next ones
  AlignedBuffer<float> factors_;   // P, then Q
  Pair kept_, fresh_, mean_;       // of the step before, of the step in hand, of the sum over ranks
  AlignedBuffer<float> scratch_;
};

}  // namespace cortado
