// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Pieces of a tensor as rows of 16 float32 values, for codecs that work in float32 whatever the tensor's dtype (fp32,
// fp16 or bf16). fp32 is used where it lies; only what is narrower, or no whole number of rows, goes through a buffer.
#pragma once

#include <cstdint>
#include <limits>

#include "cortado/tensor_view.h"

namespace cortado {

constexpr std::int64_t kRowElems = 16;

constexpr std::int64_t whole_rows(std::int64_t elems) { return (elems + kRowElems - 1) / kRowElems * kRowElems; }

// Values first ... first + elems - 1, then zeros up to whole rows. The result is in the tensor or in `buffer`, which
// has whole_rows(elems).
const float* load_piece(ConstTensorView input, std::int64_t first, std::int64_t elems, float* buffer);

// Where whole_rows(elems) values may be written that store_piece() then makes values first ... of `output`, with
// `streams` past the caches.
float* piece_target(TensorView output, std::int64_t first, std::int64_t elems, float* buffer);
void store_piece(const float* values, TensorView output, std::int64_t first, std::int64_t elems, bool streams = false);

// Adds values to first ... of `sum`, which is fp32.
void add_piece(const float* values, std::int64_t first, std::int64_t elems, TensorView sum);

// The largest finite value; of fp32, fp16 and bf16.
constexpr float largest_finite(DType dtype) {
  if (dtype == DType::kFloat16) return 65504.0f;
  return dtype == DType::kBFloat16 ? 0x1.fep127f : std::numeric_limits<float>::max();
}

}  // namespace cortado
