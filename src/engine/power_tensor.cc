// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "engine/power_tensor.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/finite.h"

namespace cortado {

PowerTensor::PowerTensor(const Setup& setup)
    : LowRankTensor(setup, setup.rank),
      col_basis_(col_elems()),
      row_local_(row_elems()),
      col_fresh_(col_elems()),
      row_sent_(row_elems()),
      col_sent_(col_elems()),
      received_(col_elems()),
      scratch_(std::max(row_elems(), col_elems())) {
  random_basis(col_basis_.data(), setup.cols, setup.rank, setup.key);
}

std::int64_t PowerTensor::factor_bytes() const {
  const auto elems = 2 * row_local_.size() + 4 * col_basis_.size() + scratch_.size();
  return static_cast<std::int64_t>(elems * sizeof(float));
}

LowRankTensor::Projection PowerTensor::projection(SlotKind) {
  return {{.col = col_basis_.data(), .rank = setup().rank}, {.row = row_local_.data()}};
}

bool PowerTensor::finish_encode(SlotKind, const PassResult& result, void* slot) {
  write_factor(row_local_.data(), row_elems(), slot);
  return result.finite && all_finite(slot, row_elems(), setup().wire);
}

void PowerTensor::receive_first_round(const void* summed, std::int64_t step) {
  first_round_finite_ = all_finite(summed, row_elems(), setup().wire);
  const float* factor = read_factor(summed, row_elems(), scratch_.data());
  std::memcpy(row_local_.data(), factor, static_cast<std::size_t>(row_elems()) * sizeof(float));
  orthogonalise_rows(row_local_.data(), setup().rows, setup().rank, key_of_step(step), scratch_.data());
}

LowRankTensor::Projection PowerTensor::second_projection() {
  return {{.row = row_local_.data(), .rank = setup().rank}, {.col = col_fresh_.data()}};
}

bool PowerTensor::finish_second_round(const PassResult& result, void* slot) {
  if (is_held()) {
    std::memset(slot, 0, static_cast<std::size_t>(wire_bytes(col_elems())));
    return true;
  }
  const double factor_squares = squares_of(col_fresh_.data(), col_elems());
  set_error(result.sum_squares, factor_squares, write_factor(col_fresh_.data(), col_elems(), slot));
  return result.finite && all_finite(slot, col_elems(), setup().wire);
}

std::optional<FactorPair> PowerTensor::mean(SlotKind, const void* summed) {
  // The orthonormal basis has lost the Inf or NaN that the first round carried; every rank must see it.
  if (!first_round_finite_) return std::nullopt;
  return FactorPair{
      .row = row_local_.data(), .col = read_factor(summed, col_elems(), scratch_.data()), .rank = setup().rank};
}

void PowerTensor::receive(SlotKind, const void* summed, std::int64_t step) {
  if (!setup().warm_start) return random_basis(received_.data(), setup().cols, setup().rank, key_of_step(step));
  const float* factor = read_factor(summed, col_elems(), received_.data());
  if (factor != received_.data())
    std::memcpy(received_.data(), factor, static_cast<std::size_t>(col_elems()) * sizeof(float));
  if (all_bits_zero(received_.data(), col_elems() * std::int64_t{sizeof(float)}))
    std::copy_n(col_basis_.data(), col_elems(), received_.data());  // nobody sent anything
}

void PowerTensor::commit(SlotKind) {
  std::memcpy(col_basis_.data(), received_.data(), static_cast<std::size_t>(col_elems()) * sizeof(float));
  std::swap(row_sent_, row_local_);
  std::swap(col_sent_, col_fresh_);
  commit_residual({.row = row_sent_.data(), .col = col_sent_.data(), .rank = setup().rank});
}

}  // namespace cortado
