// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The matrix products of linalg.h on a device: matrices are float32, row-major, in device memory. Calls give work to a
// stream and do not wait for it. `count` matrices lie one behind the other. The same call gives the same bits on
// devices of one kind; they are near those of the CPU, whose library adds in another order.
#pragma once

#include <cstdint>
#include <string>

#include "core/linalg.h"
#include "cortado/status.h"

namespace cortado {

class DeviceProducts {
 public:
  virtual ~DeviceProducts() = default;

  // The kind of device and of library: where it is the same, the bits are.
  virtual std::string kind() const = 0;

  // c = op(a) op(b): m x n, from m x k and k x n after op.
  virtual Status multiply(Operand op_a, Operand op_b, std::int64_t m, std::int64_t n, std::int64_t k, const float* a,
                          const float* b, float* c, std::int64_t count) = 0;

  // Lower triangle of c (n x n), the rest of which holds unspecified values, += alpha times the products of all pairs
  //   add_row_products:    of rows of x (n x k):    x x^T
  //   add_column_products: of columns of x (k x n, rows `x_stride` apart): x^T x
  // With `begins` c counts as zero, whatever it holds.
  virtual Status add_row_products(std::int64_t n, std::int64_t k, float alpha, const float* x, float* c, bool begins,
                                  std::int64_t count) = 0;
  virtual Status add_column_products(std::int64_t n, std::int64_t k, float alpha, const float* x, std::int64_t x_stride,
                                     float* c, bool begins) = 0;
};

}  // namespace cortado
