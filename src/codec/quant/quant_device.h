// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// `quant` on a device: its scheme of block_device.h. Not yet: `error`, which searches the step of the whole tensor.
#pragma once

#include <cmath>

#include "codec/quant/block_device.h"
#include "codec/quant/quant_grid.h"

namespace cortado {

// Clipped values in units of the step, to the numbers whose nearest integers are levels.
CORTADO_HD inline float nudged(Rounding rounding, DeadZone dead_zone, float q, float shift, std::uint32_t random) {
  switch (rounding) {
    case Rounding::kNearest:
      return q - shift;
    case Rounding::kDeadZone:
      return q - std::bit_cast<float>((std::bit_cast<std::uint32_t>(q) & 0x80000000u) |
                                      std::bit_cast<std::uint32_t>(dead_zone.shift));
    case Rounding::kStochastic:
    case Rounding::kDither:
      return q + (one_and_fraction(random) - (1.5f + shift));
  }
  return q;
}

// Levels of a dead zone as they are decoded, nearer to the middle of what they stand for.
CORTADO_HD inline float outwards(float level, DeadZone dead_zone) {
  if (level == 0) return level;
  return level + std::bit_cast<float>(std::bit_cast<std::uint32_t>(dead_zone.outwards) ^
                                      (std::bit_cast<std::uint32_t>(level) & 0x80000000u));
}

struct QuantDeviceScheme {
  static constexpr std::int64_t kSideBytes = sizeof(float);

  QuantRule rule;

  CORTADO_HD int bits() const { return rule.bits; }
  CORTADO_HD BlockScale scale() const { return rule.scale; }
  CORTADO_HD std::int64_t block_elems() const { return rule.block_elems; }
  CORTADO_HD bool is_random() const { return rule.rounding == Rounding::kStochastic || carries_key(); }
  CORTADO_HD bool carries_key() const { return rule.rounding == Rounding::kDither; }

  CORTADO_HD BlockGrid grid(const BlockStats& stats, std::int64_t elems, float largest_value) const {
    return block_grid(rule, stats, elems, 0, largest_value);
  }
  CORTADO_HD void put(const BlockGrid& grid, std::byte* side) const { store_bytes(grid.step, side); }
  CORTADO_HD bool take(const std::byte* side, float largest_value, BlockGrid* grid) const {
    grid->step = load_bytes<float>(side);
    return is_legal_step(grid->step, largest_value);
  }

  CORTADO_HD std::uint32_t code_of(const BlockGrid& grid, float value, std::uint32_t random) const {
    const float largest = rule.largest_level(), shift = rule.bits == 1 ? 0.5f : 0.0f;
    if (grid.step != grid.step) value = 0;
    value = fminf(fmaxf(value, -grid.reach), grid.reach);
    float q = value * grid.inverse;
    if (rule.filter >= 0 && fabsf(value) <= grid.threshold) q = 0;
    q = fminf(fmaxf(q, -largest), largest);
    // Rounds to nearest, ties to even: a sum with 1.5 * 2^23 has a last place of 1 and the integer in its lower bits.
    const float sum = nudged(rule.rounding, kDeadZone, q, shift, random) + 0x1.8p23f;
    return std::bit_cast<std::uint32_t>(sum) - (0x4b400000u - static_cast<std::uint32_t>(largest + shift));
  }

  CORTADO_HD float value_of(const BlockGrid& grid, std::uint32_t code, std::uint32_t random) const {
    const float largest = rule.largest_level();
    const auto number = static_cast<float>(code);
    // level - u = code - (1 + r) - (largest - 3/2), every difference exact.
    if (carries_key()) return times_step((number - one_and_fraction(random)) - (largest - 1.5f), grid.step);
    const float level = number - largest;
    return times_step(rule.rounding == Rounding::kDeadZone ? outwards(level, kDeadZone) : level, grid.step);
  }
  CORTADO_HD bool is_legal(std::uint32_t code) const {
    return code <= static_cast<std::uint32_t>(2 * rule.largest_level());
  }
};

struct QuantPlan : BlockPlan<QuantDeviceScheme> {
  static Result<QuantPlan> make(const ParameterValues& values, DeviceLayout& layout);
};

}  // namespace cortado
