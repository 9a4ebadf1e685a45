// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Between float32 and 8-bit floats, the same bits on every SIMD target. Preconditions as in quant_kernels.h.
#pragma once

#include <cstdint>

#include "codec/quant/quant_kernels.h"

namespace cortado {

// Exponent bias, mantissa bits and largest finite code are those of OCP's 8-bit Floating Point Specification 1.0.
struct Fp8Format {
  int mantissa_bits;
  int bias;
  std::uint8_t largest_code;
  float largest;  // its value

  bool operator==(const Fp8Format&) const = default;
};
constexpr Fp8Format kE4M3 = {3, 7, 0x7e, 448.0f};
constexpr Fp8Format kE5M2 = {2, 15, 0x7b, 57344.0f};

// codes[i] = values[i] * inverse of its block, rounded to the nearest, ties to even; the product is finite and rounds
// to at most format.largest.
void to_fp8(const Fp8Format& format, const BlockPiece& piece, const float* values, std::int64_t prefetch_elems,
            std::uint8_t* codes);

// values[i] = codes[i] * step of its block, exact. `streams` as for dequantise_values().
void from_fp8(const Fp8Format& format, const BlockPiece& piece, const std::uint8_t* codes, bool streams, float* values);

}  // namespace cortado
