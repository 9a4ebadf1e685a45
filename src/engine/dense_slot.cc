// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "engine/dense_slot.h"

#include <cstddef>

#include "codec/cast/float_chunks.h"
#include "core/finite.h"

namespace cortado {

namespace {

// target = source * scale
void convert(const void* source, DType from, float scale, std::int64_t elems, void* target, DType to) {
  float buffer[kChunkElems];
  for_chunks(elems, [&](std::int64_t at, std::int64_t count) {
    store_floats(load_floats(source, from, at, count, buffer), scale, count, target, to, at);
  });
}

struct Squares {
  float of_values = 0;
  float of_differences = 0;
};

// 16 sums side by side, so that compilers vectorise without reordering.
Squares sum_squares(const float* values, const float* sent, float unscale, std::int64_t count) {
  constexpr int kLanes = 16;
  float of_values[kLanes] = {};
  float of_differences[kLanes] = {};
  for (std::int64_t i = 0; i < count; ++i) {
    const float difference = values[i] - sent[i] * unscale;
    of_values[i % kLanes] += values[i] * values[i];
    of_differences[i % kLanes] += difference * difference;
  }
  Squares squares;
  for (int lane = 0; lane < kLanes; ++lane) {
    squares.of_values += of_values[lane];
    squares.of_differences += of_differences[lane];
  }
  return squares;
}

}  // namespace

DenseSlotResult write_dense_slot(const void* gradient, DType dtype, std::int64_t elems, int world_size, void* slot,
                                 DType wire) {
  const bool narrow = wire != DType::kFloat32;
  const float scale = narrow ? 1.0f / static_cast<float>(world_size) : 1.0f;
  DenseSlotResult result;
  float buffer[kChunkElems];
  float sent_buffer[kChunkElems];
  for_chunks(elems, [&](std::int64_t at, std::int64_t count) {
    const float* values = load_floats(gradient, dtype, at, count, buffer);
    store_floats(values, scale, count, slot, wire, at);
    const auto* written = static_cast<const std::byte*>(slot) + at * static_cast<std::int64_t>(dtype_bytes(wire));
    result.finite = all_finite(written, count, wire) && result.finite;
    if (!narrow) return;
    const float* sent = load_floats(slot, wire, at, count, sent_buffer);
    const Squares squares = sum_squares(values, sent, static_cast<float>(world_size), count);
    result.sum_squares += squares.of_values;
    result.error_squares += squares.of_differences;
  });
  return result;
}

void read_dense_slot(const void* slot, DType wire, std::int64_t elems, int world_size, void* output, DType dtype) {
  const float scale = wire == DType::kFloat32 ? 1.0f / static_cast<float>(world_size) : 1.0f;
  convert(slot, wire, scale, elems, output, dtype);
}

void scale_in_place(void* data, std::int64_t elems, DType dtype, int world_size) {
  const float scale = 1.0f / static_cast<float>(world_size);
  if (dtype == DType::kFloat32) {
    auto* values = static_cast<float*>(data);
    for (std::int64_t i = 0; i < elems; ++i) values[i] *= scale;
  } else {
    convert(data, dtype, scale, elems, data, dtype);
  }
}

}  // namespace cortado
