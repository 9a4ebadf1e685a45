// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "cortado/tensor_view.h"

namespace cortado {

// True if none of `elems` values is Inf or NaN.
inline bool all_finite(const void* data, std::int64_t elems, DType dtype) {
  // Exponent bits all set: Inf or NaN. Plain loops without an early end, which compilers vectorise.
  if (dtype == DType::kFloat32) {
    const auto* bits = static_cast<const std::uint32_t*>(data);
    std::uint32_t found = 0;
    for (std::int64_t i = 0; i < elems; ++i) found |= (bits[i] & 0x7f800000u) == 0x7f800000u;
    return found == 0;
  }
  const std::uint16_t exponent = dtype == DType::kFloat16 ? 0x7c00u : 0x7f80u;
  const auto* bits = static_cast<const std::uint16_t*>(data);
  std::uint16_t found = 0;
  for (std::int64_t i = 0; i < elems; ++i) found |= (bits[i] & exponent) == exponent;
  return found == 0;
}

inline void fill_with_nan(void* output, std::int64_t elems, DType dtype) {
  if (dtype == DType::kFloat32) {
    std::fill_n(static_cast<float*>(output), elems, std::numeric_limits<float>::quiet_NaN());
  } else {
    std::fill_n(static_cast<std::uint16_t*>(output), elems, std::uint16_t{0x7fff});  // NaN in fp16 and in bf16
  }
}

// True if every bit is 0; ends at the first that is not.
inline bool all_bits_zero(const void* data, std::int64_t bytes) {
  const auto* first = static_cast<const unsigned char*>(data);
  return bytes == 0 || (*first == 0 && std::memcmp(first, first + 1, static_cast<std::size_t>(bytes) - 1) == 0);
}

}  // namespace cortado
