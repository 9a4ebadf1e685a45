// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "engine/dense_slot.h"

#include <cmath>

#include "codec/cast/float_chunks.h"
#include "core/finite.h"
#include "core/float_passes.h"

namespace cortado {

namespace {

// target = source * scale
void convert(const void* source, DType from, float scale, std::int64_t elems, void* target, DType to) {
  float buffer[kChunkElems];
  for_chunks(elems, [&](std::int64_t at, std::int64_t count) {
    store_floats(load_floats(source, from, at, count, buffer), scale, count, target, to, at);
  });
}

}  // namespace

DenseSlotResult write_dense_slot(const void* gradient, DType dtype, std::int64_t elems, int world_size, void* slot,
                                 DType wire) {
  const float scale = wire != DType::kFloat32 ? 1.0f / static_cast<float>(world_size) : 1.0f;
  const auto unscale = static_cast<float>(world_size);
  DenseSlotResult result;
  float buffer[kChunkElems];
  for_chunks(elems, [&](std::int64_t at, std::int64_t count) {
    const float* values = load_floats(gradient, dtype, at, count, buffer);
    if (wire == DType::kFloat32) {
      store_floats(values, scale, count, slot, wire, at);
      result.finite = all_finite(static_cast<const float*>(slot) + at, count, wire) && result.finite;
      return;
    }
    const CastSquares squares = measured_cast(values, scale, unscale, count, slot, wire, at);
    result.sum_squares += squares.of_values;
    result.error_squares += squares.of_differences;
    // Squares may overflow where values do not.
    const bool may_be_infinite = !std::isfinite(squares.of_values) || !std::isfinite(squares.of_differences);
    if (may_be_infinite) {
      result.finite = all_finite(static_cast<std::uint16_t*>(slot) + at, count, wire) && result.finite;
    }
  });
  return result;
}

void read_dense_slot(const void* slot, DType wire, std::int64_t elems, int world_size, void* output, DType dtype) {
  // Narrow wires carry means.
  const float scale = wire == DType::kFloat32 ? 1.0f / static_cast<float>(world_size) : 1.0f;
  if (wire != DType::kFloat32 && dtype == DType::kFloat32) {
    return widen_gradient(slot, wire, elems, static_cast<float*>(output));
  }
  convert(slot, wire, scale, elems, output, dtype);
}

void scale_in_place(void* data, std::int64_t elems, DType dtype, int world_size) {
  const float scale = 1.0f / static_cast<float>(world_size);
  if (dtype == DType::kFloat32) {
    auto* const values = static_cast<float*>(data);
    scale_values(values, scale, elems, values);
  } else {
    convert(data, dtype, scale, elems, data, dtype);
  }
}

}  // namespace cortado
