// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// One value from float32 to fp16 or bf16 and back: the reference that the kernels of codec/cast/ are compared with.
//
// Narrowing rounds to the nearest, ties to even. Magnitudes that round beyond the largest finite value become Inf,
// denormals are kept, signs are kept, zeros and NaN too. A NaN keeps the upper bits of its payload and becomes quiet.
// Widening is exact; fp16 NaN become quiet, bf16 NaN keep every bit. This is what the conversion instructions of x86
// and Arm do.
#pragma once

#include <bit>
#include <cstdint>

#include "core/device.h"

namespace cortado {

CORTADO_HD inline std::uint16_t float_to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x0040u);
  const std::uint32_t odd = (bits >> 16) & 1u;
  return static_cast<std::uint16_t>((bits + 0x7fffu + odd) >> 16);
}

CORTADO_HD inline float bf16_to_float(std::uint16_t value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value) << 16);
}

CORTADO_HD inline std::uint16_t float_to_fp16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t exponent = magnitude >> 23;
  std::uint32_t result;
  if (magnitude > 0x7f800000u) {  // NaN
    result = 0x7e00u | (magnitude >> 13 & 0x1ffu);
  } else if (exponent >= 127 + 16) {  // 65536 and more
    result = 0x7c00u;
  } else if (exponent >= 127 - 14) {  // normal in fp16; a carry out of the largest one is Inf
    const std::uint32_t rebiased = magnitude - (112u << 23);
    result = (rebiased + 0x0fffu + (rebiased >> 13 & 1u)) >> 13;
  } else if (exponent < 127 - 25) {  // below half of the smallest denormal
    result = 0;
  } else {  // a multiple of 2^-24
    const std::uint32_t significand = (magnitude & 0x007fffffu) | 0x00800000u;
    const std::uint32_t shift = 126u - exponent;
    const std::uint32_t quotient = significand >> shift;
    const std::uint32_t half = 1u << (shift - 1);
    result = (significand + (half - 1) + (quotient & 1u)) >> shift;
  }
  return static_cast<std::uint16_t>(sign | result);
}

CORTADO_HD inline float fp16_to_float(std::uint16_t value) {
  const std::uint32_t sign = (value & 0x8000u) << 16;
  const std::uint32_t exponent = value >> 10 & 0x1fu;
  const std::uint32_t mantissa = value & 0x3ffu;
  std::uint32_t magnitude;
  if (exponent == 0) {
    magnitude = std::bit_cast<std::uint32_t>(static_cast<float>(mantissa) * 0x1p-24f);
  } else if (exponent == 0x1f) {
    magnitude = 0x7f800000u | mantissa << 13 | (mantissa != 0 ? 0x00400000u : 0u);
  } else {
    magnitude = (exponent + 112u) << 23 | mantissa << 13;
  }
  return std::bit_cast<float>(sign | magnitude);
}

}  // namespace cortado
