// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Power-SGD (algorithm 1).  round 0: row_local = A col_basis^T,  row_local = orth(sum of row_local)
//                           round 1: col_fresh = A^T row_local,  next col_basis = sum of col_fresh
#pragma once

#include "engine/lowrank_tensor.h"

namespace cortado {

class PowerTensor final : public LowRankTensor {
 public:
  explicit PowerTensor(const Setup& setup);
  bool finish_encode(SlotKind kind, const PassResult& result, void* slot) override;
  void receive_first_round(const void* summed, std::int64_t step) override;
  Projection second_projection() override;
  bool finish_second_round(const PassResult& result, void* slot) override;
  std::optional<FactorPair> mean(SlotKind kind, const void* summed) override;
  void receive(SlotKind kind, const void* summed, std::int64_t step) override;
  void commit(SlotKind kind) override;
  std::span<float> basis(SlotKind) override { return col_basis_.span(); }
  std::int64_t factor_bytes() const override;

 private:
  Projection projection(SlotKind kind) override;

  AlignedBuffer<float> col_basis_;              // the same on every rank
  AlignedBuffer<float> row_local_, col_fresh_;  // of the step in hand
  AlignedBuffer<float> row_sent_, col_sent_;    // of the step before: what the residual still has to lose
  AlignedBuffer<float> received_, scratch_;
  bool first_round_finite_ = true;
};

}  // namespace cortado
