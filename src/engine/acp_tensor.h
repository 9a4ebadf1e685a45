// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// ACP-SGD (section 2.2).  P-step: row_local = A col_basis^T,  next row_basis = orth(sum of row_local)
//                         Q-step: col_local = A^T row_basis,  next col_basis = orth(sum of col_local)
#pragma once

#include "engine/lowrank_tensor.h"

namespace cortado {

class AcpTensor final : public LowRankTensor {
 public:
  explicit AcpTensor(const Setup& setup);
  bool finish_encode(SlotKind kind, const PassResult& result, void* slot) override;
  std::optional<FactorPair> mean(SlotKind kind, const void* summed) override;
  void receive(SlotKind kind, const void* summed, std::int64_t step) override;
  void commit(SlotKind kind) override;
  std::span<float> basis(SlotKind kind) override;
  std::span<float> other_basis(SlotKind kind) override;
  std::int64_t factor_bytes() const override;

 private:
  Projection projection(SlotKind kind) override;
  std::int64_t slot_elems(SlotKind kind) const { return kind == SlotKind::kRowFactor ? row_elems() : col_elems(); }

  AlignedBuffer<float> row_basis_, col_basis_;  // orthonormal, the same on every rank
  AlignedBuffer<float> row_local_, col_local_;  // what this rank computed last, as rounded for the wire
  AlignedBuffer<float> received_, scratch_;
};

}  // namespace cortado
