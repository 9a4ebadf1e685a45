// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "engine/dense_slot.h"

#include <algorithm>
#include <cstddef>

#include "codec/cast/cast_kernels.h"
#include "core/finite.h"

namespace cortado {

namespace {

constexpr std::int64_t kChunkElems = 1024;

const float* load(const void* source, DType dtype, std::int64_t at, std::int64_t count, float* buffer) {
  switch (dtype) {
    case DType::kFloat16:
      fp16_to_fp32(static_cast<const std::uint16_t*>(source) + at, count, buffer);
      return buffer;
    case DType::kBFloat16:
      bf16_to_fp32(static_cast<const std::uint16_t*>(source) + at, count, buffer);
      return buffer;
    default:
      return static_cast<const float*>(source) + at;
  }
}

void store(const float* source, float scale, std::int64_t count, void* target, DType dtype, std::int64_t at) {
  switch (dtype) {
    case DType::kFloat16:
      scale_and_cast_fp16(source, scale, count, static_cast<std::uint16_t*>(target) + at);
      break;
    case DType::kBFloat16:
      scale_and_cast_bf16(source, scale, count, static_cast<std::uint16_t*>(target) + at);
      break;
    default:
      for (std::int64_t i = 0; i < count; ++i) static_cast<float*>(target)[at + i] = source[i] * scale;
  }
}

// target = source * scale, and whether all of it is finite, a chunk at a time so that the check finds it in cache.
bool convert(const void* source, DType from, float scale, std::int64_t elems, void* target, DType to) {
  float buffer[kChunkElems];
  bool finite = true;
  for (std::int64_t at = 0; at < elems; at += kChunkElems) {
    const std::int64_t count = std::min(kChunkElems, elems - at);
    store(load(source, from, at, count, buffer), scale, count, target, to, at);
    const auto* written = static_cast<const std::byte*>(target) + at * static_cast<std::int64_t>(dtype_bytes(to));
    finite = all_finite(written, count, to) && finite;
  }
  return finite;
}

}  // namespace

bool write_dense_slot(const void* gradient, DType dtype, std::int64_t elems, int world_size, void* slot, DType wire) {
  const float scale = wire == DType::kFloat32 ? 1.0f : 1.0f / static_cast<float>(world_size);
  return convert(gradient, dtype, scale, elems, slot, wire);
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
