// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "engine/lowrank_tensor.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "codec/cast/cast_kernels.h"
#include "core/check.h"
#include "core/finite.h"
#include "engine/acp_tensor.h"
#include "engine/power_tensor.h"
#include "engine/two_sided_tensor.h"

namespace cortado {

std::unique_ptr<LowRankTensor> LowRankTensor::make(const EngineOptions& options, const Setup& setup) {
  if (options.method == EngineOptions::Method::kPower) return std::make_unique<PowerTensor>(setup);
  if (options.sides == EngineOptions::Sides::kBoth) return std::make_unique<TwoSidedTensor>(setup);
  return std::make_unique<AcpTensor>(setup);
}

void LowRankTensor::receive_first_round(const void*, std::int64_t) { CORTADO_CHECK(false, "this codec has one round"); }

LowRankTensor::Projection LowRankTensor::second_projection() {
  CORTADO_CHECK(false, "this codec has one round");
  return {};
}

bool LowRankTensor::finish_second_round(const PassResult&, void*) {
  CORTADO_CHECK(false, "this codec has one round");
  return false;
}

LowRankTensor::Projection LowRankTensor::begin_encode(SlotKind kind) {
  is_held_ = false;
  return projection(kind);
}

PassResult LowRankTensor::project(const ResidualPass& pass, const Projection& projection) const {
  const auto& [bases, factors] = projection;
  if (bases.row == nullptr) return project_rows(pass, bases.col, bases.rank, factors.row);
  if (bases.col == nullptr) return project_cols(pass, bases.row, bases.rank, factors.col);
  return project_both(pass, bases, factors);
}

bool LowRankTensor::encode(SlotKind kind, const void* gradient, double gradient_scale, void* slot) {
  const Projection projection = begin_encode(kind);
  pass_ = ResidualPass{.rows = setup_.rows,
                       .cols = setup_.cols,
                       .gradient = gradient,
                       .gradient_dtype = setup_.dtype,
                       .gradient_scale = static_cast<float>(1.0 / gradient_scale),
                       .residual_in = residual_,
                       .residual_out = spare_ != nullptr ? spare_ : residual_,
                       .sent = sent_};
  return finish_encode(kind, project(pass_, projection), slot);
}

bool LowRankTensor::encode_second_round(void* slot) {
  if (is_held_) return finish_second_round({}, slot);
  ResidualPass again = pass_;
  if (residual_ != nullptr) {  // A is what the first pass left there
    again.gradient = nullptr;
    again.residual_in = pass_.residual_out;
    again.residual_out = nullptr;
    again.sent = {};
  }
  return finish_second_round(project(again, second_projection()), slot);
}

void LowRankTensor::decode(SlotKind kind, const void* summed, double gradient_scale, void* output) {
  const std::optional<FactorPair> pair = mean(kind, summed);
  if (!pair.has_value()) return fill_with_nan(output, setup_.rows * setup_.cols, setup_.dtype);
  reconstruct(*pair, setup_.rows, setup_.cols, decode_scale(gradient_scale), output, setup_.dtype,
              /*streams=*/true);
}

void LowRankTensor::set_residual(float* residual, float* spare) {
  residual_ = residual;
  spare_ = spare;
}

BasisKey LowRankTensor::key_of_step(std::int64_t step) const {
  BasisKey key = setup_.key;
  key.step = static_cast<std::uint64_t>(step) + 1;
  return key;
}

void LowRankTensor::random_row_basis(float* row_basis, float* scratch) const {
  BasisKey key = setup_.key;
  key.tensor = ~key.tensor;  // not the columns' numbers
  random_basis(scratch, setup_.rows, setup_.rank, key);
  for (std::int64_t i = 0; i < setup_.rows; ++i)
    for (int k = 0; k < setup_.rank; ++k) row_basis[i * setup_.rank + k] = scratch[k * setup_.rows + i];
}

void LowRankTensor::hold(SlotKind kind, void* slot) {
  is_held_ = true;
  materialise_residual();  // the pair still to be subtracted may lie in memory that the step overwrites
  const std::int64_t elems = LayoutTensor{setup_.rows, setup_.cols, setup_.rank}.slot_elems(kind);
  std::memset(slot, 0, static_cast<std::size_t>(wire_bytes(elems)));
  set_error(0, 0, 0);
}

void LowRankTensor::commit_residual(const FactorPair& sent) {
  if (is_held_) return;
  const bool has_residual = residual_ != nullptr || is_elsewhere_;  // or there is nothing to subtract from
  sent_ = has_residual ? sent : FactorPair{};
  if (spare_ != nullptr) std::swap(residual_, spare_);
}

void LowRankTensor::rollback(const void* gradient) {
  if (is_elsewhere_) sent_ = {};
  if (residual_ == nullptr || spare_ != nullptr || is_held_) return;
  pass_.gradient = gradient;
  undo_pass(pass_, residual_);
  sent_ = {};
}

void LowRankTensor::materialise_residual() {
  if (residual_ != nullptr) materialise(setup_.rows, setup_.cols, sent_, residual_);
  sent_ = {};
}

// Narrow wires carry means, which fit wherever the gradients did; float32 carries sums, as published (ACP-SGD,
// section 2.2).
float LowRankTensor::wire_scale() const {
  return setup_.wire == DType::kFloat32 ? 1.0f : 1.0f / static_cast<float>(setup_.world_size);
}

float LowRankTensor::decode_scale(double gradient_scale) const {
  return static_cast<float>(setup_.wire == DType::kFloat32 ? gradient_scale / setup_.world_size : gradient_scale);
}

double LowRankTensor::write_factor(float* factor, std::int64_t elems, void* slot) const {
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

const float* LowRankTensor::read_factor(const void* summed, std::int64_t elems, float* widened) const {
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

// A projection on orthonormal bases loses |A|^2 - |factors|^2; the rounding of the wire comes on top.
void LowRankTensor::set_error(double sum_squares, double factor_squares, double wire_error_squares) {
  sum_squares_ = sum_squares;
  error_squares_ = std::max(0.0, sum_squares - factor_squares) + wire_error_squares;
}

double squares_of(const float* values, std::int64_t elems) {
  double squares = 0;
  for (std::int64_t i = 0; i < elems; ++i) squares += static_cast<double>(values[i]) * values[i];
  return squares;
}

}  // namespace cortado
