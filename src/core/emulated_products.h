// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// For tests: DeviceProducts whose device is the CPU, as EmulatedDevice is. What a product leaves unspecified becomes
// NaN.
#pragma once

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "core/device_products.h"

namespace cortado {

class EmulatedProducts : public DeviceProducts {
 public:
  explicit EmulatedProducts(std::string kind = "emulated") : kind_(std::move(kind)) {}

  std::string kind() const override { return kind_; }

  Status multiply(Operand op_a, Operand op_b, std::int64_t m, std::int64_t n, std::int64_t k, const float* a,
                  const float* b, float* c, std::int64_t count) override {
    for (std::int64_t i = 0; i < count; ++i) {
      cortado::multiply(op_a, op_b, m, n, k, a + i * m * k, b + i * k * n, c + i * m * n);
    }
    return {};
  }

  Status add_row_products(std::int64_t n, std::int64_t k, float alpha, const float* x, float* c, bool begins,
                          std::int64_t count) override {
    for (std::int64_t i = 0; i < count; ++i) {
      if (begins) clear(n, c + i * n * n);
      cortado::add_row_products(n, k, alpha, x + i * n * k, c + i * n * n, n);
    }
    return {};
  }

  Status add_column_products(std::int64_t n, std::int64_t k, float alpha, const float* x, std::int64_t x_stride,
                             float* c, bool begins) override {
    if (begins) clear(n, c);
    const std::int64_t rows = x_stride == n ? k : 1;  // at a time
    for (std::int64_t r = 0; r < k; r += rows) cortado::add_column_products(n, rows, alpha, x + r * x_stride, c, n);
    return {};
  }

 private:
  static void clear(std::int64_t n, float* c) {
    for (std::int64_t i = 0; i < n; ++i) {
      std::fill(c + i * n, c + i * n + i + 1, 0.0f);
      std::fill(c + i * n + i + 1, c + (i + 1) * n, std::numeric_limits<float>::quiet_NaN());
    }
  }

  const std::string kind_;
};

}  // namespace cortado
