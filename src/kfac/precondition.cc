// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "kfac/precondition.h"

#include <cmath>

#include "core/linalg.h"

namespace cortado {

namespace {

double mean(const float* values, std::int64_t n) {
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum += static_cast<double>(values[i]);
  return sum / static_cast<double>(n);
}

}  // namespace

SplitDamping split_damping(double damping, double mean_a, double mean_g) {
  const double root = std::sqrt(damping);
  const double pi = mean_a > 0 && mean_g > 0 ? std::sqrt(mean_a / mean_g) : 1;
  return {.a = pi * root, .g = root / pi};
}

void precondition_by_eigen(std::int64_t outputs, std::int64_t inputs, const Eigen& g, const Eigen& a, double damping,
                           bool splits, const float* w, float* v, float* scratch) {
  multiply(Operand::kAsIs, Operand::kAsIs, outputs, inputs, outputs, g.vectors, w, scratch);
  multiply(Operand::kAsIs, Operand::kTransposed, outputs, inputs, inputs, scratch, a.vectors, v);
  const SplitDamping split =
      splits ? split_damping(damping, mean(a.values, inputs), mean(g.values, outputs)) : SplitDamping{};
  const auto added = splits ? 0.0f : static_cast<float>(damping);
  for (std::int64_t i = 0; i < outputs; ++i) {
    const float d_g = g.values[i] + static_cast<float>(split.g);
    for (std::int64_t j = 0; j < inputs; ++j) {
      v[i * inputs + j] /= d_g * (a.values[j] + static_cast<float>(split.a)) + added;
    }
  }
  multiply(Operand::kTransposed, Operand::kAsIs, outputs, inputs, outputs, g.vectors, v, scratch);
  multiply(Operand::kAsIs, Operand::kAsIs, outputs, inputs, inputs, scratch, a.vectors, v);
}

void precondition_by_inverse(std::int64_t outputs, std::int64_t inputs, const float* g_inverse, const float* a_inverse,
                             const float* w, float* v, float* scratch) {
  multiply(Operand::kAsIs, Operand::kAsIs, outputs, inputs, outputs, g_inverse, w, scratch);
  multiply(Operand::kAsIs, Operand::kAsIs, outputs, inputs, inputs, scratch, a_inverse, v);
}

double inner_product(const float* left, const float* right, std::int64_t elems) {
  double sum = 0;
  for (std::int64_t i = 0; i < elems; ++i) sum += static_cast<double>(left[i]) * static_cast<double>(right[i]);
  return sum;
}

}  // namespace cortado
