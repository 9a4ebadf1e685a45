// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "engine/lowrank_tensor.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "codec/cast/cast_kernels.h"
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

LowRankTensor::LowRankTensor(const Setup& setup)
    : setup_(setup),
      row_basis_(setup.rows * setup.rank),
      row_local_(setup.rows * setup.rank),
      col_basis_(setup.cols * setup.rank),
      col_local_(setup.cols * setup.rank),
      col_fresh_(setup.two_rounds ? setup.cols * setup.rank : 0),
      received_(factor_elems()),
      scratch_(factor_elems()) {
  random_basis(col_basis_.data(), setup.cols, setup.rank, setup.key);
  BasisKey row_key = setup.key;
  row_key.tensor = ~row_key.tensor;
  random_basis(received_.data(), setup.rows, setup.rank, row_key);
  for (std::int64_t i = 0; i < setup.rows; ++i)
    for (int k = 0; k < setup.rank; ++k) row_basis_[i * setup.rank + k] = received_[k * setup.rows + i];
}

void LowRankTensor::set_residual(float* residual, float* spare) {
  residual_ = residual;
  spare_ = spare;
}

std::int64_t LowRankTensor::factor_bytes() const {
  const auto elems = row_basis_.size() + row_local_.size() + col_basis_.size() + col_local_.size() + col_fresh_.size() +
                     received_.size() + scratch_.size();
  return static_cast<std::int64_t>(elems * sizeof(float));
}

// Narrow wires carry means, which fit wherever the gradients did; float32 carries sums, as published (section 2.2).
float LowRankTensor::wire_scale() const {
  return setup_.wire == DType::kFloat32 ? 1.0f : 1.0f / static_cast<float>(setup_.world_size);
}

// Puts the factor on the wire. With a narrow wire the factor becomes what the others will read, so that the rounding is
// error-fed-back too; returns the squares of that rounding.
double LowRankTensor::write_slot(float* factor, std::int64_t elems, void* slot) const {
  if (setup_.wire == DType::kFloat32) {
    std::memcpy(slot, factor, static_cast<std::size_t>(elems) * sizeof(float));
    return 0;
  }
  auto* narrow = static_cast<std::uint16_t*>(slot);
  const float unscale = static_cast<float>(setup_.world_size);
  double error_squares = 0;
  constexpr std::int64_t kChunkElems = 256;
  float rounded[kChunkElems];
  for (std::int64_t i = 0; i < elems; i += kChunkElems) {
    const std::int64_t count = std::min(kChunkElems, elems - i);
    if (setup_.wire == DType::kFloat16) {
      scale_and_cast_fp16(factor + i, wire_scale(), count, narrow + i);
      fp16_to_fp32(narrow + i, count, rounded);
    } else {
      scale_and_cast_bf16(factor + i, wire_scale(), count, narrow + i);
      bf16_to_fp32(narrow + i, count, rounded);
    }
    for (std::int64_t j = 0; j < count; ++j) {
      const float sent = rounded[j] * unscale;
      error_squares += static_cast<double>(factor[i + j] - sent) * (factor[i + j] - sent);
      factor[i + j] = sent;
    }
  }
  return error_squares;
}

// A projection on an orthonormal basis loses |A|^2 - |factor|^2; the rounding of the wire comes on top.
void LowRankTensor::measure(const PassResult& pass, const float* factor, std::int64_t elems,
                            double wire_error_squares) {
  double factor_squares = 0;
  for (std::int64_t i = 0; i < elems; ++i) factor_squares += static_cast<double>(factor[i]) * factor[i];
  sum_squares_ = pass.sum_squares;
  error_squares_ = std::max(0.0, pass.sum_squares - factor_squares) + wire_error_squares;
}

bool LowRankTensor::encode(SlotKind side, const void* gradient, double gradient_scale, void* slot) {
  pass_ = ResidualPass{.rows = setup_.rows,
                       .cols = setup_.cols,
                       .gradient = gradient,
                       .gradient_dtype = setup_.dtype,
                       .gradient_scale = static_cast<float>(1.0 / gradient_scale),
                       .residual_in = residual_,
                       .residual_out = spare_ != nullptr ? spare_ : residual_,
                       .sent = sent_};
  const bool rows = side == SlotKind::kRowFactor;
  float* factor = rows ? row_local_.data() : col_local_.data();
  const PassResult result = rows ? project_rows(pass_, col_basis_.data(), setup_.rank, factor)
                                 : project_cols(pass_, row_basis_.data(), setup_.rank, factor);
  // The squares before write_slot rounds the factor.
  const std::int64_t elems = slot_elems(side);
  measure(result, factor, elems, 0);
  error_squares_ += write_slot(factor, elems, slot);
  return result.finite && all_finite(slot, elems, setup_.wire);
}

const float* LowRankTensor::widen(const void* summed, std::int64_t elems, float* widened) const {
  switch (setup_.wire) {
    case DType::kFloat16:
      fp16_to_fp32(static_cast<const std::uint16_t*>(summed), elems, widened);
      return widened;
    case DType::kBFloat16:
      bf16_to_fp32(static_cast<const std::uint16_t*>(summed), elems, widened);
      return widened;
    default:
      return static_cast<const float*>(summed);
  }
}

void LowRankTensor::receive_first_round(const void* summed, std::int64_t step) {
  const std::int64_t elems = slot_elems(SlotKind::kRowFactor);
  const float* factor = widen(summed, elems, received_.data());
  first_round_finite_ = all_finite(summed, elems, setup_.wire);
  std::memcpy(row_local_.data(), factor, static_cast<std::size_t>(elems) * sizeof(float));
  BasisKey key = setup_.key;
  key.step = static_cast<std::uint64_t>(step) + 1;
  orthogonalise_rows(row_local_.data(), setup_.rows, setup_.rank, key, scratch_.data());
}

bool LowRankTensor::encode_second_round(void* slot) {
  ResidualPass pass = pass_;
  if (residual_ != nullptr) {  // A is what round 0 left there
    pass.gradient = nullptr;
    pass.residual_in = pass_.residual_out;
    pass.residual_out = nullptr;
    pass.sent = {};
  }
  const PassResult result = project_cols(pass, row_local_.data(), setup_.rank, col_fresh_.data());
  const std::int64_t elems = slot_elems(SlotKind::kColFactor);
  measure(result, col_fresh_.data(), elems, 0);
  error_squares_ += write_slot(col_fresh_.data(), elems, slot);
  return result.finite && all_finite(slot, elems, setup_.wire);
}

void LowRankTensor::decode(SlotKind side, const void* summed, double gradient_scale, void* output) {
  const float* factor = widen(summed, slot_elems(side), scratch_.data());
  const float scale = static_cast<float>(gradient_scale / (setup_.world_size * static_cast<double>(wire_scale())));
  FactorPair pair{.row = factor, .col = col_basis_.data(), .rank = setup_.rank};
  if (side == SlotKind::kColFactor) {
    pair = {.row = setup_.two_rounds ? row_local_.data() : row_basis_.data(), .col = factor, .rank = setup_.rank};
  }
  if (setup_.two_rounds && !first_round_finite_) {
    // The orthonormal basis has lost the Inf or NaN that the first round carried; every rank must see it.
    fill_nan(output, setup_.rows * setup_.cols, setup_.dtype);
    return;
  }
  reconstruct(pair, setup_.rows, setup_.cols, scale, output, setup_.dtype);
}

void LowRankTensor::receive(SlotKind side, const void* summed, std::int64_t step) {
  const std::int64_t elems = slot_elems(side);
  const float* factor = widen(summed, elems, received_.data());
  if (factor != received_.data())
    std::memcpy(received_.data(), factor, static_cast<std::size_t>(elems) * sizeof(float));
  BasisKey key = setup_.key;
  key.step = static_cast<std::uint64_t>(step) + 1;
  if (!setup_.warm_start) {
    std::fill_n(received_.data(), elems, 0.0f);  // zero vectors are replaced by random ones
  } else if (setup_.two_rounds) {
    return;  // Power-SGD projects on the sum itself
  }
  if (side == SlotKind::kRowFactor) {
    orthogonalise_rows(received_.data(), setup_.rows, setup_.rank, key, scratch_.data());
  } else {
    orthogonalise(received_.data(), setup_.cols, setup_.rank, key);
  }
}

void LowRankTensor::commit(SlotKind side) {
  const std::size_t bytes = static_cast<std::size_t>(slot_elems(side)) * sizeof(float);
  if (side == SlotKind::kRowFactor) {
    std::memcpy(row_basis_.data(), received_.data(), bytes);
    sent_ = {.row = row_local_.data(), .col = col_basis_.data(), .rank = setup_.rank};
  } else {
    std::memcpy(col_basis_.data(), received_.data(), bytes);
    if (setup_.two_rounds) {
      std::swap(row_basis_, row_local_);
      std::swap(col_local_, col_fresh_);
    }
    sent_ = {.row = row_basis_.data(), .col = col_local_.data(), .rank = setup_.rank};
  }
  if (residual_ == nullptr) sent_ = {};  // nothing to subtract it from
  if (spare_ != nullptr) std::swap(residual_, spare_);
}

void LowRankTensor::rollback(const void* gradient) {
  if (residual_ == nullptr || spare_ != nullptr) return;
  pass_.gradient = gradient;
  undo_pass(pass_, residual_);
  sent_ = {};
}

void LowRankTensor::materialise_residual() {
  if (residual_ != nullptr) materialise(setup_.rows, setup_.cols, sent_, residual_);
  sent_ = {};
}

}  // namespace cortado
