// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "kfac/gradient_matrix.h"

#include <algorithm>

#include "core/float16.h"

namespace cortado {

namespace {

struct Float32 {
  using Stored = float;
  static float load(float value) { return value; }
  static float store(float value) { return value; }
};
struct Float16 {
  using Stored = std::uint16_t;
  static float load(std::uint16_t value) { return fp16_to_float(value); }
  static std::uint16_t store(float value) { return float_to_fp16(value); }
};
struct BFloat16 {
  using Stored = std::uint16_t;
  static float load(std::uint16_t value) { return bf16_to_float(value); }
  static std::uint16_t store(float value) { return float_to_bf16(value); }
};

template <typename F>
void with_format(DType dtype, const F& f) {
  if (dtype == DType::kFloat32) return f(Float32());
  if (dtype == DType::kFloat16) return f(Float16());
  f(BFloat16());
}

// f(row of the matrix, row of the weight, place of the bias)
template <typename Format, typename F>
void for_rows(const KfacLayer& layer, const KfacGradient& gradient, const F& f) {
  using Stored = typename Format::Stored;
  for (std::int64_t row = 0; row < layer.groups * layer.outputs; ++row) {
    f(row * layer.a_dim(), static_cast<Stored*>(gradient.weight) + row * layer.inputs,
      layer.has_bias ? static_cast<Stored*>(gradient.bias) + row : nullptr);
  }
}

}  // namespace

void load_gradient(const KfacLayer& layer, const KfacGradient& gradient, float* matrix) {
  if (gradient.weight == nullptr) {
    std::fill(matrix, matrix + layer.gradient_elems(), 0.0f);
    return;
  }
  with_format(gradient.dtype, [&](auto format) {
    using Format = decltype(format);
    for_rows<Format>(layer, gradient, [&](std::int64_t at, const auto* weight, const auto* bias) {
      for (std::int64_t j = 0; j < layer.inputs; ++j) matrix[at + j] = Format::load(weight[j]);
      if (bias != nullptr) matrix[at + layer.inputs] = Format::load(*bias);
    });
  });
}

void store_gradient(const KfacLayer& layer, const float* matrix, float scale, const KfacGradient& gradient) {
  if (gradient.weight == nullptr) return;
  with_format(gradient.dtype, [&](auto format) {
    using Format = decltype(format);
    for_rows<Format>(layer, gradient, [&](std::int64_t at, auto* weight, auto* bias) {
      for (std::int64_t j = 0; j < layer.inputs; ++j) weight[j] = Format::store(matrix[at + j] * scale);
      if (bias != nullptr) *bias = Format::store(matrix[at + layer.inputs] * scale);
    });
  });
}

}  // namespace cortado
