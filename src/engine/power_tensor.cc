// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "engine/power_tensor.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "core/finite.h"

namespace cortado {

namespace {

void fill_nan(void* output, std::int64_t elems, DType dtype) {
  if (dtype == DType::kFloat32) {
    std::fill_n(static_cast<float*>(output), elems, std::numeric_limits<float>::quiet_NaN());
  } else {
    std::fill_n(static_cast<std::uint16_t*>(output), elems, std::uint16_t{0x7fff});  // NaN in fp16 and in bf16
  }
}

}  // namespace

PowerTensor::PowerTensor(const Setup& setup)
    : LowRankTensor(setup),
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

bool PowerTensor::encode(SlotKind, const void* gradient, double gradient_scale, void* slot) {
  const PassResult result =
      project_rows(begin_pass(gradient, gradient_scale), col_basis_.data(), setup().rank, row_local_.data());
  write_factor(row_local_.data(), row_elems(), slot);
  return result.finite && all_finite(slot, row_elems(), setup().wire);
}

void PowerTensor::receive_first_round(const void* summed, std::int64_t step) {
  first_round_finite_ = all_finite(summed, row_elems(), setup().wire);
  const float* factor = read_factor(summed, row_elems(), scratch_.data());
  std::memcpy(row_local_.data(), factor, static_cast<std::size_t>(row_elems()) * sizeof(float));
  orthogonalise_rows(row_local_.data(), setup().rows, setup().rank, key_of_step(step), scratch_.data());
}

bool PowerTensor::encode_second_round(void* slot) {
  if (is_held()) {
    std::memset(slot, 0, static_cast<std::size_t>(wire_bytes(col_elems())));
    return true;
  }
  ResidualPass again = pass();
  if (residual() != nullptr) {  // A is what round 0 left there
    again.gradient = nullptr;
    again.residual_in = pass().residual_out;
    again.residual_out = nullptr;
    again.sent = {};
  }
  const PassResult result = project_cols(again, row_local_.data(), setup().rank, col_fresh_.data());
  const double factor_squares = squares_of(col_fresh_.data(), col_elems());
  set_error(result.sum_squares, factor_squares, write_factor(col_fresh_.data(), col_elems(), slot));
  return result.finite && all_finite(slot, col_elems(), setup().wire);
}

void PowerTensor::decode(SlotKind, const void* summed, double gradient_scale, void* output) {
  if (!first_round_finite_) {
    // The orthonormal basis has lost the Inf or NaN that the first round carried; every rank must see it.
    return fill_nan(output, setup().rows * setup().cols, setup().dtype);
  }
  const float* factor = read_factor(summed, col_elems(), scratch_.data());
  reconstruct({.row = row_local_.data(), .col = factor, .rank = setup().rank}, setup().rows, setup().cols,
              decode_scale(gradient_scale), output, setup().dtype);
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
