// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/pieces.h"

#include <algorithm>
#include <cstring>

#include "codec/cast/cast_kernels.h"
#include "core/float_passes.h"

namespace cortado {

namespace {

// Pointers into tensors need no alignment, and are only handed to kernels and memcpy.
template <typename T, typename Byte>
T* element(Byte* data, std::int64_t index, DType dtype) {
  return reinterpret_cast<T*>(data + index * static_cast<std::int64_t>(dtype_bytes(dtype)));
}

// The piece behind this one, if there is one. Kernels ask for what they read next themselves, but here they read the
// buffer.
void prefetch_next(ConstTensorView input, std::int64_t first, std::int64_t elems) {
  constexpr std::int64_t kLineBytes = 64;
  const auto elem_bytes = static_cast<std::int64_t>(dtype_bytes(input.dtype));
  const std::int64_t begin = (first + elems) * elem_bytes,
                     end = std::min(begin + elems * elem_bytes, input.size_bytes());
  const auto* data = static_cast<const char*>(input.data);
  for (std::int64_t at = begin; at < end; at += kLineBytes) __builtin_prefetch(data + at);
}

bool lies_in_rows(DType dtype, std::int64_t elems) { return dtype == DType::kFloat32 && elems % kRowElems == 0; }

}  // namespace

const float* load_piece(ConstTensorView input, std::int64_t first, std::int64_t elems, float* buffer) {
  const auto* data = static_cast<const std::byte*>(input.data);
  if (lies_in_rows(input.dtype, elems)) return element<const float>(data, first, input.dtype);
  if (input.dtype == DType::kFloat32) {
    std::memcpy(buffer, element<const std::byte>(data, first, input.dtype), static_cast<std::size_t>(elems) * 4);
  } else {
    prefetch_next(input, first, elems);
    const auto* halves = element<const std::uint16_t>(data, first, input.dtype);
    input.dtype == DType::kFloat16 ? fp16_to_fp32(halves, elems, buffer) : bf16_to_fp32(halves, elems, buffer);
  }
  std::fill(buffer + elems, buffer + whole_rows(elems), 0.0f);
  return buffer;
}

float* piece_target(TensorView output, std::int64_t first, std::int64_t elems, float* buffer) {
  if (!lies_in_rows(output.dtype, elems)) return buffer;
  return element<float>(static_cast<std::byte*>(output.data), first, output.dtype);
}

void store_piece(const float* values, TensorView output, std::int64_t first, std::int64_t elems, bool streams) {
  auto* data = static_cast<std::byte*>(output.data);
  if (lies_in_rows(output.dtype, elems)) return;
  if (output.dtype == DType::kFloat32) {
    std::memcpy(element<std::byte>(data, first, output.dtype), values, static_cast<std::size_t>(elems) * 4);
  } else if (output.dtype == DType::kFloat16) {
    fp32_to_fp16(values, elems, element<std::uint16_t>(data, first, output.dtype), streams);
  } else {
    fp32_to_bf16(values, elems, element<std::uint16_t>(data, first, output.dtype), streams);
  }
}

void add_piece(const float* values, std::int64_t first, std::int64_t elems, TensorView sum) {
  add_values(values, elems, element<float>(static_cast<std::byte*>(sum.data), first, sum.dtype));
}

}  // namespace cortado
