// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Values of any float dtype as float32, a piece at a time that stays in the first-level cache.
#pragma once

#include <algorithm>
#include <cstdint>

#include "codec/cast/cast_kernels.h"
#include "core/float_passes.h"
#include "core/streaming.h"
#include "cortado/tensor_view.h"

namespace cortado {

constexpr std::int64_t kChunkElems = 1024;

// `count` (at most kChunkElems) values from element `at` on: in `source` itself if they are float32, else in `buffer`.
inline const float* load_floats(const void* source, DType dtype, std::int64_t at, std::int64_t count, float* buffer) {
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

// target[at ...] = source * scale, rounded once. `streams`: as scale_values() has it, of float32.
inline void store_floats(const float* source, float scale, std::int64_t count, void* target, DType dtype,
                         std::int64_t at, bool streams = false) {
  switch (dtype) {
    case DType::kFloat16:
      scale_and_cast_fp16(source, scale, count, static_cast<std::uint16_t*>(target) + at);
      break;
    case DType::kBFloat16:
      scale_and_cast_bf16(source, scale, count, static_cast<std::uint16_t*>(target) + at);
      break;
    default:
      scale_values(source, scale, count, static_cast<float*>(target) + at, streams);
  }
}

// target[at ...] = source * scale, rounded once to 16 bits, and what that takes from source, as measured_cast_bf16()
// has it.
inline CastSquares measured_cast(const float* source, float scale, float unscale, std::int64_t count, void* target,
                                 DType dtype, std::int64_t at) {
  auto* written = static_cast<std::uint16_t*>(target) + at;
  return dtype == DType::kFloat16 ? measured_cast_fp16(source, scale, unscale, count, written)
                                  : measured_cast_bf16(source, scale, unscale, count, written);
}

// A whole gradient of 16 bits into its place: a large one past the caches, from the first cache line on.
inline void widen_gradient(const void* source, DType from, std::int64_t elems, float* target) {
  const auto widen = from == DType::kFloat16 ? fp16_to_fp32 : bf16_to_fp32;
  const auto* values = static_cast<const std::uint16_t*>(source);
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(float));
  if (elems * kBytes < kLeastStreamedGradientBytes) return widen(values, elems, target, false);
  const std::int64_t head = std::min(elems, bytes_to_stream_alignment(target) / kBytes);
  widen(values, head, target, false);
  widen(values + head, elems - head, target + head, true);
  finish_streams();
}

// Calls act(at, count) for all chunks of `elems` elements.
template <typename Act>
void for_chunks(std::int64_t elems, Act&& act) {
  for (std::int64_t at = 0; at < elems; at += kChunkElems) act(at, std::min(kChunkElems, elems - at));
}

}  // namespace cortado
