// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "engine/acp_tensor.h"

#include <algorithm>
#include <cstring>

#include "core/finite.h"

namespace cortado {

AcpTensor::AcpTensor(const Setup& setup)
    : LowRankTensor(setup, setup.rank),
      row_basis_(row_elems()),
      col_basis_(col_elems()),
      row_local_(row_elems()),
      col_local_(col_elems()),
      received_(std::max(row_elems(), col_elems())),
      scratch_(std::max(row_elems(), col_elems())) {
  random_basis(col_basis_.data(), setup.cols, setup.rank, setup.key);
  random_row_basis(row_basis_.data(), scratch_.data());
}

std::int64_t AcpTensor::factor_bytes() const {
  const auto elems = 2 * row_basis_.size() + 2 * col_basis_.size() + received_.size() + scratch_.size();
  return static_cast<std::int64_t>(elems * sizeof(float));
}

std::span<float> AcpTensor::basis(SlotKind kind) {
  return kind == SlotKind::kRowFactor ? col_basis_.span() : row_basis_.span();
}

std::span<float> AcpTensor::other_basis(SlotKind kind) {
  return kind == SlotKind::kRowFactor ? row_basis_.span() : col_basis_.span();
}

LowRankTensor::Projection AcpTensor::projection(SlotKind kind) {
  if (kind == SlotKind::kRowFactor) {
    return {{.col = col_basis_.data(), .rank = setup().rank}, {.row = row_local_.data()}};
  }
  return {{.row = row_basis_.data(), .rank = setup().rank}, {.col = col_local_.data()}};
}

bool AcpTensor::finish_encode(SlotKind kind, const PassResult& result, void* slot) {
  float* factor = kind == SlotKind::kRowFactor ? row_local_.data() : col_local_.data();
  const std::int64_t elems = slot_elems(kind);
  const double factor_squares = squares_of(factor, elems);
  set_error(result.sum_squares, factor_squares, write_factor(factor, elems, slot));
  return result.finite && all_finite(slot, elems, setup().wire);
}

std::optional<FactorPair> AcpTensor::mean(SlotKind kind, const void* summed) {
  const float* factor = read_factor(summed, slot_elems(kind), scratch_.data());
  return kind == SlotKind::kRowFactor ? FactorPair{.row = factor, .col = col_basis_.data(), .rank = setup().rank}
                                      : FactorPair{.row = row_basis_.data(), .col = factor, .rank = setup().rank};
}

void AcpTensor::receive(SlotKind kind, const void* summed, std::int64_t step) {
  const std::int64_t elems = slot_elems(kind);
  const float* factor = read_factor(summed, elems, received_.data());
  if (factor != received_.data())
    std::memcpy(received_.data(), factor, static_cast<std::size_t>(elems) * sizeof(float));
  if (!setup().warm_start) {
    std::fill_n(received_.data(), elems, 0.0f);  // zero vectors are replaced by random ones
  } else if (all_bits_zero(received_.data(), elems * std::int64_t{sizeof(float)})) {
    std::copy_n(kind == SlotKind::kRowFactor ? row_basis_.data() : col_basis_.data(), elems, received_.data());
    return;  // nobody sent anything
  }
  if (kind == SlotKind::kRowFactor) {
    orthogonalise_rows(received_.data(), setup().rows, setup().rank, key_of_step(step), scratch_.data());
  } else {
    orthogonalise(received_.data(), setup().cols, setup().rank, key_of_step(step));
  }
}

void AcpTensor::commit(SlotKind kind) {
  const std::size_t bytes = static_cast<std::size_t>(slot_elems(kind)) * sizeof(float);
  if (kind == SlotKind::kRowFactor) {
    std::memcpy(row_basis_.data(), received_.data(), bytes);
    commit_residual({.row = row_local_.data(), .col = col_basis_.data(), .rank = setup().rank});
  } else {
    std::memcpy(col_basis_.data(), received_.data(), bytes);
    commit_residual({.row = row_basis_.data(), .col = col_local_.data(), .rank = setup().rank});
  }
}

}  // namespace cortado
