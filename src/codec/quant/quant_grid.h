// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// From the statistics of a block to its grid; spec.md has the formulas. Inline, since it is called for every block, on
// devices as well.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "codec/quant/quant_rule.h"

namespace cortado {

// Keeps x / step, and what is decoded from it, out of the denormal range.
// In device code constants have no address: std::max() is given copies.
constexpr float kSmallestStep = 0x1p-116f;
// The step of a block in which something is not finite.
constexpr std::uint32_t kNanStepBits = 0x7fc00000u;

// A value at the end of the last level's cell, in steps.
// How far beyond its level a value may be decoded, in steps.
constexpr float overhang_of(Rounding rounding) {
  return rounding == Rounding::kDither ? 0.5f : rounding == Rounding::kDeadZone ? kDeadZone.outwards : 0.0f;
}

constexpr float reach_of(Rounding rounding, float largest_level) {
  switch (rounding) {
    case Rounding::kNearest:
      return largest_level + 0.5f;
    case Rounding::kDeadZone:
      return largest_level + 0.65f;
    case Rounding::kStochastic:
    case Rounding::kDither:
      return largest_level;
  }
  return largest_level;
}

CORTADO_HD inline float scale_of(BlockScale scale, const BlockStats& stats, std::int64_t elems) {
  constexpr double kMost = std::numeric_limits<float>::max();
  switch (scale) {
    case BlockScale::kMax:
      return std::bit_cast<float>(stats.max_magnitude);
    case BlockScale::kRms:
      return static_cast<float>(std::sqrt(stats.squares / static_cast<double>(elems)));
    case BlockScale::kL2:
      return static_cast<float>(std::min(std::sqrt(stats.squares), kMost));
    case BlockScale::kRange:
      return static_cast<float>(std::min(static_cast<double>(stats.high) - static_cast<double>(stats.low), kMost));
  }
  return 0;
}

// `tensor_step`: what kError found. `largest_value`: the largest finite one of the tensor's dtype.
CORTADO_HD inline BlockGrid block_grid(const QuantRule& s, const BlockStats& stats, std::int64_t elems,
                                       float tensor_step, float largest_value) {
  BlockGrid grid;
  if (stats.max_magnitude >= kInfinityBits || tensor_step != tensor_step) {
    grid.step = std::bit_cast<float>(kNanStepBits);
    return grid;
  }
  if (stats.max_magnitude == 0) return grid;
  const float scale = scale_of(s.scale, stats, elems);
  if (s.rule == QuantRule::StepRule::kBits) {
    grid.step = scale * s.step;
  } else {
    const bool is_relative = s.rule == QuantRule::StepRule::kBound;
    const float wanted = is_relative ? scale * s.step : s.rule == QuantRule::StepRule::kError ? tensor_step : s.step;
    grid.step = std::max(wanted, std::bit_cast<float>(stats.max_magnitude) / reach_of(s.rounding, s.largest_level()));
  }
  grid.step = std::min(std::max(grid.step, +kSmallestStep), largest_value);
  grid.inverse = 1 / grid.step;
  if (s.filter >= 0) grid.threshold = s.filter * scale;
  // The last level, and what rounding adds to it, must not lead beyond the dtype.
  const float overhang = overhang_of(s.rounding);
  if (grid.step * (s.largest_level() + overhang) > largest_value && s.bits > 1) {
    const float last = std::floor(largest_value / grid.step - overhang);
    grid.reach = ((last + overhang) * grid.step > largest_value ? last - 1 : last) * grid.step;
  }
  return grid;
}

// One that block_grid() can have made.
CORTADO_HD inline bool is_legal_step(float step, float largest_value) {
  const auto bits = std::bit_cast<std::uint32_t>(step);
  return (step >= kSmallestStep && step <= largest_value) || bits == 0 || bits == kNanStepBits;
}

}  // namespace cortado
