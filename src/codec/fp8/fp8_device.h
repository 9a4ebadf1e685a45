// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// `fp8` on a device: its scheme of block_device.h.
#pragma once

#include <cmath>

#include "codec/fp8/fp8_grid.h"
#include "codec/quant/block_device.h"

namespace cortado {

// A finite value to its code: the sum of a magnitude and a power of two whose last place is that of the result does the
// rounding; fp8_kernels.cc says how.
CORTADO_HD inline std::uint32_t to_fp8(const Fp8Format& format, float value) {
  const int dropped = 23 - format.mantissa_bits;
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t smallest = static_cast<std::uint32_t>(128 - format.bias) << 23;
  const std::uint32_t exponent = std::max(bits & 0x7f800000u, smallest);
  const std::uint32_t power = exponent + (static_cast<std::uint32_t>(dropped) << 23);
  const float sum = std::bit_cast<float>(bits & 0x7fffffffu) + std::bit_cast<float>(power);
  const std::uint32_t mantissa = std::bit_cast<std::uint32_t>(sum) - power;
  return (mantissa + ((exponent - smallest) >> dropped)) | (bits >> 24 & 0x80u);
}

CORTADO_HD inline float from_fp8(const Fp8Format& format, std::uint32_t code) {
  const int dropped = 23 - format.mantissa_bits;
  const std::uint32_t magnitude = code & 0x7fu;
  float value;
  if (magnitude < 1u << format.mantissa_bits) {
    value = static_cast<float>(magnitude) * power_of_two(1 - format.bias - format.mantissa_bits);
  } else {
    value = std::bit_cast<float>((magnitude << dropped) + (static_cast<std::uint32_t>(127 - format.bias) << 23));
  }
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) | (code & 0x80u) << 24);
}

struct Fp8DeviceScheme {
  static constexpr std::int64_t kSideBytes = 1;

  Fp8Format format;
  std::int64_t elems_of_block;

  CORTADO_HD int bits() const { return 8; }
  CORTADO_HD BlockScale scale() const { return BlockScale::kMax; }
  CORTADO_HD std::int64_t block_elems() const { return elems_of_block; }
  CORTADO_HD bool is_random() const { return false; }
  CORTADO_HD bool carries_key() const { return false; }

  CORTADO_HD BlockGrid grid(const BlockStats& stats, std::int64_t, float largest_value) const {
    return fp8_grid(format, stats.max_magnitude, largest_value);
  }
  CORTADO_HD void put(const BlockGrid& grid, std::byte* side) const { *side = static_cast<std::byte>(fp8_scale(grid)); }
  CORTADO_HD bool take(const std::byte* side, float largest_value, BlockGrid* grid) const {
    const auto scale = static_cast<std::uint8_t>(*side);
    *grid = fp8_grid_of(scale);
    return is_fp8_scale(format, scale, largest_value);
  }
  CORTADO_HD std::uint32_t code_of(const BlockGrid& grid, float value, std::uint32_t) const {
    if (grid.step != grid.step) value = 0;
    value = fminf(fmaxf(value, -grid.reach), grid.reach);
    return to_fp8(format, value * grid.inverse);
  }
  CORTADO_HD float value_of(const BlockGrid& grid, std::uint32_t code, std::uint32_t) const {
    return times_step(from_fp8(format, code), grid.step);
  }
  CORTADO_HD bool is_legal(std::uint32_t code) const { return (code & 0x7fu) <= format.largest_code; }
};

struct Fp8Plan : BlockPlan<Fp8DeviceScheme> {
  static Result<Fp8Plan> make(const ParameterValues& values, DeviceLayout& layout);
};

}  // namespace cortado
