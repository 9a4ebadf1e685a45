// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What stands around the products of precondition.h on a device.
#pragma once

#include "codec/device_tensors.h"
#include "core/device.h"
#include "kfac/triangle_device.h"

namespace cortado {

// The gradient of a layer: a weight of rows x inputs and, unless null, a bias of rows, which is the last column of its
// matrix (gradient_matrix.h).
struct DeviceGradient {
  void *weight, *bias;
  DType dtype;
  std::int64_t rows, inputs;

  CORTADO_HD std::int64_t cols() const { return inputs + (bias != nullptr ? 1 : 0); }
};

// matrix = gradient * scale. A launch of element_blocks(rows * cols).
struct LoadGradient {
  static constexpr int kThreads = kElementThreads;

  DeviceGradient gradient;
  float scale;
  float* matrix;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    block.each([&](int t) {
      const std::int64_t at = block.number() * kThreads + t, cols = gradient.cols();
      if (at >= gradient.rows * cols) return;
      const std::int64_t row = at / cols, col = at % cols;
      const float value = col < gradient.inputs
                              ? load_value(gradient.weight, gradient.dtype, row * gradient.inputs + col)
                              : load_value(gradient.bias, gradient.dtype, row);
      matrix[at] = value * scale;
    });
  }
};

// gradient = matrix * scale, rounded to its dtype. A launch of element_blocks(rows * cols).
struct StoreGradient {
  static constexpr int kThreads = kElementThreads;

  DeviceGradient gradient;
  float scale;
  const float* matrix;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    block.each([&](int t) {
      const std::int64_t at = block.number() * kThreads + t, cols = gradient.cols();
      if (at >= gradient.rows * cols) return;
      const std::int64_t row = at / cols, col = at % cols;
      if (col < gradient.inputs) {
        store_value(matrix[at] * scale, gradient.weight, gradient.dtype, row * gradient.inputs + col);
      } else {
        store_value(matrix[at] * scale, gradient.bias, gradient.dtype, row);
      }
    });
  }
};

// Of `count` matrices of outputs x inputs: v /= (d_G + root / pi) (d_A + root pi)^T + added, with a pi for each.
struct DivideByEigenvalues {
  static constexpr int kThreads = kElementThreads;

  std::int64_t outputs, inputs, count;
  const float *g_values, *a_values;
  const double* pis;
  double root;
  float added;
  float* v;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    block.each([&](int t) {
      const std::int64_t at = block.number() * kThreads + t, elems = outputs * inputs;
      if (at >= count * elems) return;
      const std::int64_t matrix = at / elems, row = at % elems / inputs, col = at % inputs;
      const auto split_a = static_cast<float>(pis[matrix] * root), split_g = static_cast<float>(root / pis[matrix]);
      const float d_g = g_values[matrix * outputs + row] + split_g;
      v[at] /= d_g * (a_values[matrix * inputs + col] + split_a) + added;
    });
  }
};

// Sums of the products of values with the same place, each of kElems of them and in double precision, in an order that
// does not depend on the device.
struct InnerProducts {
  static constexpr int kThreads = kElementThreads;
  static constexpr std::int64_t kElems = 16 * kThreads;  // of a block
  static constexpr std::int64_t blocks(std::int64_t elems) { return (elems + kElems - 1) / kElems; }

  std::int64_t elems;
  const float *left, *right;
  double* sums;  // of each block

  struct Shared {
    double of_warp[kThreads / kWarpThreads];
  };

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared& shared) const {
    typename Block::template PerThread<double> sum;
    block.each_in_warp([&](int t) {
      double own = 0;
      const std::int64_t end = block.number() * kElems + kElems;
      for (std::int64_t i = block.number() * kElems + t; i < end && i < elems; i += kThreads) {
        own += static_cast<double>(left[i]) * static_cast<double>(right[i]);
      }
      sum[t] = own;
    });
    block.butterfly(sum, kWarpThreads, [](double a, double b) { return a + b; });
    block.each([&](int t) {
      if (t % kWarpThreads == 0) shared.of_warp[t / kWarpThreads] = sum[t];
    });
    block.each([&](int t) {
      if (t != 0) return;
      double all = 0;
      for (const double each : shared.of_warp) all += each;
      sums[block.number()] = all;
    });
  }
};

}  // namespace cortado
