// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Scales of blocks: from the largest magnitude to a power of two, and its byte. For the codec and its device variant.
#pragma once

#include <algorithm>
#include <bit>

#include "codec/fp8/fp8_kernels.h"
#include "core/device.h"
#include "core/exponent.h"

namespace cortado {

// Scales are exponents in a byte, biased as float32's; 255 is NaN, as in OCP's microscaling formats.
constexpr int kFp8ScaleBias = 127;
constexpr std::uint8_t kFp8NanScale = 255;
// From here on neither scaled nor decoded values meet float32's denormals.
constexpr int kFp8SmallestExponent = -108;

CORTADO_HD inline BlockGrid fp8_grid_of(std::uint8_t scale) {
  BlockGrid grid;
  const bool is_nan = scale == kFp8NanScale;
  grid.step = is_nan ? std::numeric_limits<float>::quiet_NaN() : power_of_two(scale - kFp8ScaleBias);
  grid.inverse = is_nan ? 0.0f : power_of_two(kFp8ScaleBias - scale);
  return grid;
}

CORTADO_HD inline BlockGrid fp8_grid(const Fp8Format& format, std::uint32_t max_magnitude, float largest_value) {
  constexpr std::uint32_t kMantissa = 0x007fffffu;
  if (max_magnitude >= kInfinityBits) return fp8_grid_of(kFp8NanScale);
  const auto max = std::bit_cast<float>(max_magnitude);
  int exponent = exponent_of(max) - exponent_of(format.largest);
  if ((max_magnitude & kMantissa) > (std::bit_cast<std::uint32_t>(format.largest) & kMantissa)) ++exponent;
  BlockGrid grid = fp8_grid_of(static_cast<std::uint8_t>(std::max(exponent, +kFp8SmallestExponent) + kFp8ScaleBias));
  // Rounding up must not take the largest values of the dtype to Inf: what the format has of them is the most.
  const std::uint32_t dropped = (1u << (23 - format.mantissa_bits)) - 1;
  const auto reach = std::bit_cast<float>(std::bit_cast<std::uint32_t>(largest_value) & ~dropped);
  if (max > reach) grid.reach = reach;
  return grid;
}

// Of a grid made from a scale.
CORTADO_HD inline std::uint8_t fp8_scale(const BlockGrid& grid) {
  return static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(grid.step) >> 23 & 0xffu);
}

// One that a block of finite values can have, or NaN.
CORTADO_HD inline bool is_fp8_scale(const Fp8Format& format, std::uint8_t scale, float largest_value) {
  const int most = exponent_of(largest_value) - exponent_of(format.largest) + 1 + kFp8ScaleBias;
  return scale == kFp8NanScale || (scale >= kFp8SmallestExponent + kFp8ScaleBias && scale <= most);
}

}  // namespace cortado
