// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "engine/two_sided_tensor.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/finite.h"

namespace cortado {

TwoSidedTensor::TwoSidedTensor(const Setup& setup)
    : LowRankTensor(setup, 2 * setup.rank),
      bases_(row_elems() + col_elems()),
      received_(row_elems() + col_elems()),
      factors_(row_elems() + col_elems()),
      scratch_(2 * row_elems()) {
  for (Pair* pair : {&kept_, &fresh_, &mean_}) {
    pair->row = AlignedBuffer<float>(static_cast<std::size_t>(2 * row_elems()));
    pair->col = AlignedBuffer<float>(static_cast<std::size_t>(2 * col_elems()));
  }
  random_row_basis(row_basis(), scratch_.data());
  random_basis(col_basis(), setup.cols, setup.rank, setup.key);
}

std::int64_t TwoSidedTensor::factor_bytes() const {
  const auto elems = 3 * bases_.size() + 3 * (kept_.row.size() + kept_.col.size()) + scratch_.size();
  return static_cast<std::int64_t>(elems * sizeof(float));
}

FactorPair TwoSidedTensor::join(Pair* pair) {
  const int rank = setup().rank;
  const float* row_factor = factors_.data();
  float* col_factor = factors_.data() + row_elems();
  remove_overlap({setup().rows, setup().cols, rank, row_basis(), col_basis()}, row_factor, col_factor, scratch_.data());
  for (std::int64_t i = 0; i < setup().rows; ++i) {
    float* row = pair->row.data() + i * 2 * rank;
    std::copy_n(row_factor + i * rank, rank, row);
    std::copy_n(row_basis() + i * rank, rank, row + rank);
  }
  std::copy_n(col_basis(), col_elems(), pair->col.data());
  std::copy_n(col_factor, col_elems(), pair->col.data() + col_elems());
  return {.row = pair->row.data(), .col = pair->col.data(), .rank = 2 * rank};
}

LowRankTensor::Projection TwoSidedTensor::projection(SlotKind) {
  return {{row_basis(), col_basis(), setup().rank}, {factors_.data(), factors_.data() + row_elems()}};
}

bool TwoSidedTensor::finish_encode(SlotKind, const PassResult& result, void* slot) {
  const float* col_factor = factors_.data() + row_elems();
  const std::int64_t elems = row_elems() + col_elems();
  const double wire_error_squares = write_factor(factors_.data(), elems, slot);
  const double row_squares = squares_of(factors_.data(), row_elems());
  join(&fresh_);
  set_error(result.sum_squares, row_squares + squares_of(col_factor, col_elems()), wire_error_squares);
  return result.finite && all_finite(slot, elems, setup().wire);
}

std::optional<FactorPair> TwoSidedTensor::mean(SlotKind, const void* summed) {
  const std::int64_t elems = row_elems() + col_elems();
  const float* both = read_factor(summed, elems, factors_.data());
  if (both != factors_.data()) std::copy_n(both, elems, factors_.data());
  return join(&mean_);
}

void TwoSidedTensor::receive(SlotKind, const void* summed, std::int64_t step) {
  const std::int64_t elems = row_elems() + col_elems();
  const float* both = read_factor(summed, elems, received_.data());
  if (both != received_.data()) std::copy_n(both, elems, received_.data());
  if (!setup().warm_start) {
    std::fill_n(received_.data(), elems, 0.0f);  // zero vectors are replaced by random ones
  } else if (all_bits_zero(received_.data(), elems * std::int64_t{sizeof(float)})) {
    std::copy_n(bases_.data(), elems, received_.data());  // nobody sent anything
    return;
  }
  BasisKey row_key = key_of_step(step);
  row_key.tensor = ~row_key.tensor;
  orthogonalise_rows(received_.data(), setup().rows, setup().rank, row_key, scratch_.data());
  orthogonalise(received_.data() + row_elems(), setup().cols, setup().rank, key_of_step(step));
}

void TwoSidedTensor::commit(SlotKind) {
  std::copy_n(received_.data(), received_.size(), bases_.data());
  std::swap(kept_, fresh_);
  commit_residual({.row = kept_.row.data(), .col = kept_.col.data(), .rank = 2 * setup().rank});
}

}  // namespace cortado
