// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The settings of `compso`, and from the range of a block to its levels: for the codec and its device variant.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "codec/pieces.h"
#include "codec/quant/quant_kernels.h"
#include "core/device.h"
#include "cortado/tensor_view.h"

namespace cortado {

constexpr std::int64_t kCompsoBlockUnit = kMaxPieceElems;

struct CompsoSettings {
  double bound = 4e-3;  // step of a block over its range; 0: lossless
  double filter = 0;    // magnitudes up to this share of the range become 0
  Rounding rounding = Rounding::kStochastic;
  bool is_coded = true;
  double error = 0;              // if not 0: the relative L2 error of a block, in place of the bound; no filter then
  std::int64_t block_elems = 0;  // a multiple of kCompsoBlockUnit; 0: a layer is one block
  std::int64_t chunk_codes = 65536;

  bool is_lossless() const { return bound == 0 && error == 0; }
  bool finds_dead_zone() const { return error > 0 && rounding == Rounding::kDeadZone; }
};

// Beyond these, 1 / step or what is decoded could be denormal. In device code constants have no address: std::max() is
// given copies.
constexpr float kCompsoSmallestStep = 0x1p-116f, kCompsoLargestStep = 0x1p126f;
constexpr float kCompsoFarthestLevel = 0x1p21f;
constexpr double kCompsoFinestStep = 0x1p-21;  // over the largest magnitude
constexpr std::int32_t kCompsoLevelLimit = 1 << 22;
constexpr float kCompsoLargestNudge = 255.0f / 512;  // what random rounding adds, at most
constexpr std::uint32_t kCompsoNanStep = 0x7fc00000u;

// Codes of level 0: of one byte, and of two, whose high byte is 128 as well.
constexpr std::int32_t kCompsoZeroCode = 128, kCompsoWideZeroCode = 128 * 257;

// Of the values of a block.
struct CompsoBlockRange {
  float low = 0, high = 0;
  bool is_finite = true;

  CORTADO_HD double width() const { return static_cast<double>(high) - static_cast<double>(low); }
  CORTADO_HD float largest() const { return std::max(std::fabs(low), std::fabs(high)); }
};

// The step nearest to `wanted` that is allowed for such values; 0 if they are all 0.
CORTADO_HD inline float compso_step(double wanted, const CompsoBlockRange& range) {
  if (range.largest() == 0) return 0;
  const double step = std::max(wanted, static_cast<double>(range.largest()) * kCompsoFinestStep);
  return static_cast<float>(std::clamp<double>(step, kCompsoSmallestStep, kCompsoLargestStep));
}
// With a bound.
CORTADO_HD inline float compso_step_of_bound(const CompsoSettings& settings, const CompsoBlockRange& range) {
  // Equal values come back as they were, but for dither, of which the finest step comes nearest to that.
  const double of_equal = settings.rounding == Rounding::kDither ? 0.0 : static_cast<double>(range.largest());
  return compso_step(range.width() > 0 ? settings.bound * range.width() : of_equal, range);
}

// How far beyond its level a value may be decoded, in steps.
CORTADO_HD inline float compso_overhang(Rounding rounding, const DeadZone& dead_zone) {
  if (rounding == Rounding::kDither) return 0.5f;
  return rounding == Rounding::kDeadZone ? dead_zone.outwards : 0;
}

CORTADO_HD inline bool is_random(Rounding rounding) {
  return rounding == Rounding::kStochastic || rounding == Rounding::kDither;
}

CORTADO_HD inline BlockGrid compso_grid(float step, const DeadZone& dead_zone, const CompsoSettings& settings,
                                        const CompsoBlockRange& range, DType dtype) {
  if (step == 0) return {.step = 0, .inverse = 0, .threshold = -1, .reach = 0};
  const double threshold = settings.filter * range.width();
  // Nothing finite is decoded as Inf.
  const float largest = largest_finite(dtype), overhang = compso_overhang(settings.rounding, dead_zone);
  // Level 1 must not lead beyond the dtype either.
  float most = largest / (1 + overhang);
  if ((1 + overhang) * most > largest) most *= 1 - 0x1p-23f;
  step = std::min(step, most);
  float reach = std::floor(largest / step - overhang);
  if (reach > 0 && (reach + overhang) * step > largest) reach -= 1;
  if (reach < 1 && (1 + overhang) * step <= largest) reach = 1;  // the quotient was rounded
  // From 2^15 on the sum with a random number may be rounded up from an odd level.
  if (is_random(settings.rounding) && reach >= 0x1p15f) reach = 2 * std::floor(reach / 2);
  return {.step = step,
          .inverse = 1 / step,
          .threshold = static_cast<float>(std::min<double>(threshold, std::numeric_limits<float>::max())),
          .reach = std::min(+kCompsoFarthestLevel, reach)};
}

struct CompsoLevels {
  std::int32_t first = 0, last = 0;
};

// The smallest and the largest level that rounding can give.
CORTADO_HD inline CompsoLevels compso_levels(const BlockGrid& grid, const CompsoSettings& settings,
                                             const CompsoBlockRange& range) {
  const auto clipped = [&](float value) { return std::min(std::max(value * grid.inverse, -grid.reach), +grid.reach); };
  const float low = clipped(range.low), high = clipped(range.high);
  CompsoLevels levels = {static_cast<std::int32_t>(std::floor(low)), static_cast<std::int32_t>(std::ceil(high))};
  if (is_random(settings.rounding)) {
    // Far from 0 the sum with a random number is rounded, up to a half, and a half to the even level.
    const auto nearest = [](float q) { return static_cast<std::int32_t>((q + 0x1.8p23f) - 0x1.8p23f); };
    levels.first = std::min(levels.first, nearest(low - kCompsoLargestNudge));
    levels.last = std::max(levels.last, nearest(high + kCompsoLargestNudge));
  }
  if (settings.filter > 0 && range.low <= grid.threshold) levels.first = std::min(levels.first, 0);
  if (settings.filter > 0 && -range.high <= grid.threshold) levels.last = std::max(levels.last, 0);
  return levels;
}

// Whether levels of a block may spread further than a byte tells apart.
CORTADO_HD inline bool compso_may_be_wide(const CompsoSettings& settings) {
  // What is so far from 0 that rounding may leave the two levels next to it, no filter takes to 0.
  return settings.error > 0 || std::max((1 + settings.filter) / settings.bound + 4, 1 / settings.bound + 6) > 256;
}

CORTADO_HD inline bool is_compso_step(float step) {
  const auto bits = std::bit_cast<std::uint32_t>(step);
  return bits == 0 || bits == kCompsoNanStep || (step >= kCompsoSmallestStep && step <= kCompsoLargestStep);
}

}  // namespace cortado
