// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cortado/tensor_view.h"

namespace cortado {

// A gradient that travels whole. float32 wires carry the values and the mean is taken after the sum; narrow wires carry
// values / world_size, which can't overflow where the mean does not.

struct DenseSlotResult {
  bool finite = true;        // false: a value is Inf or NaN, in the gradient or after rounding to the wire's dtype
  double sum_squares = 0;    // of the gradient, and of what rounding to a narrow wire took from it; 0 on float32 wires,
  double error_squares = 0;  // which lose nothing
};

DenseSlotResult write_dense_slot(const void* gradient, DType dtype, std::int64_t elems, int world_size, void* slot,
                                 DType wire);

// output = mean.
void read_dense_slot(const void* slot, DType wire, std::int64_t elems, int world_size, void* output, DType dtype);

// data *= 1 / world_size, rounded once a value: what DDP does before it sums.
void scale_in_place(void* data, std::int64_t elems, DType dtype, int world_size);

}  // namespace cortado
