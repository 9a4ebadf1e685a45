// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// `compso` one value at a time, from spec.md: the executable specification that the tests hold the kernels to. No
// target error, no coder.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "codec/compso/compso_layers.h"

namespace cortado {

struct CompsoReferenceBlock {
  float step = 0;
  std::int32_t first_level = 0, last_level = 0;
  std::vector<std::int32_t> levels;
  std::vector<float> decoded;
};

// The random number of value `number` of the message: (byte + 1/2) / 256.
inline float compso_random(const EncodeContext& context, std::int64_t number) {
  // A tile of 256 values has 16 Philox blocks; block j serves the values j, 16 + j, 32 + j ..., a byte each.
  const std::int64_t tile = number / 256, row = number % 256 / 16, lane = number % 16;
  const PhiloxBlock block =
      philox_block(context.seed, context.step, context.tensor, static_cast<std::uint64_t>(16 * tile + lane));
  const std::uint32_t byte = block[static_cast<std::size_t>(row / 4)] >> (8 * (row % 4)) & 255;
  return (static_cast<float>(byte) + 0.5f) / 256;
}

// `values` are those of one block, the first of them number `first_random` of the message; `largest_value` is the
// dtype's.
inline CompsoReferenceBlock compso_reference(const CompsoSettings& settings, const std::vector<float>& values,
                                             const EncodeContext& context, std::int64_t first_random,
                                             float largest_value) {
  CompsoReferenceBlock block;
  const auto non_finite = [](float x) { return !std::isfinite(x); };
  if (std::any_of(values.begin(), values.end(), non_finite)) {
    block.step = std::numeric_limits<float>::quiet_NaN();
    block.levels.assign(values.size(), 0);
    block.decoded.assign(values.size(), block.step);
    return block;
  }
  const float low = *std::min_element(values.begin(), values.end());
  const float high = *std::max_element(values.begin(), values.end());
  const float largest = std::max(std::fabs(low), std::fabs(high));
  const double range = static_cast<double>(high) - static_cast<double>(low);
  if (largest > 0) {
    const double of_equal = settings.rounding == Rounding::kDither ? 0.0 : static_cast<double>(largest);
    const double wanted = range > 0 ? settings.bound * range : of_equal;
    const double step = std::max(wanted, static_cast<double>(largest) * 0x1p-21);
    block.step = static_cast<float>(std::clamp(step, 0x1p-116, 0x1p126));
  }
  const float overhang = settings.rounding == Rounding::kDither     ? 0.5f
                         : settings.rounding == Rounding::kDeadZone ? 0.05f
                                                                    : 0;
  float most = largest_value / (1 + overhang);
  if ((1 + overhang) * most > largest_value) most *= 1 - 0x1p-23f;
  block.step = std::min(block.step, most);
  const float inverse = block.step > 0 ? 1 / block.step : 0;
  float reach = block.step > 0 ? std::min(0x1p21f, std::floor(largest_value / block.step - overhang)) : 0;
  while (reach > 0 && (reach + overhang) * block.step > largest_value) reach -= 1;
  if (block.step > 0 && reach < 1 && (1 + overhang) * block.step <= largest_value) reach = 1;
  const bool is_random = settings.rounding == Rounding::kStochastic || settings.rounding == Rounding::kDither;
  if (is_random && reach >= 0x1p15f) reach = 2 * std::floor(reach / 2);
  const float threshold =
      static_cast<float>(std::min<double>(settings.filter * range, std::numeric_limits<float>::max()));
  const auto quotient = [&](float x) { return std::clamp(x * inverse, -reach, reach); };
  block.first_level = static_cast<std::int32_t>(std::floor(quotient(low)));
  block.last_level = static_cast<std::int32_t>(std::ceil(quotient(high)));
  if (is_random) {
    const float most = 255.0f / 512;
    block.first_level = std::min(block.first_level, static_cast<std::int32_t>(std::nearbyint(quotient(low) - most)));
    block.last_level = std::max(block.last_level, static_cast<std::int32_t>(std::nearbyint(quotient(high) + most)));
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    const bool is_filtered = settings.filter > 0 && std::fabs(values[i]) <= threshold;
    const float q = is_filtered ? 0 : quotient(values[i]);
    const float r = compso_random(context, first_random + static_cast<std::int64_t>(i));
    float level = 0, offset = 0;
    switch (settings.rounding) {
      case Rounding::kNearest:
        level = std::nearbyint(q);
        break;
      case Rounding::kDeadZone:
        level = std::nearbyint(q - std::copysign(0.15f, q));
        offset = level == 0 ? 0 : std::copysign(0.05f, level);
        break;
      case Rounding::kStochastic:
        level = std::nearbyint(q + (r - 0.5f));
        break;
      case Rounding::kDither:
        level = std::nearbyint(q + (r - 0.5f));
        offset = -(r - 0.5f);
        break;
    }
    if (is_filtered) {
      block.first_level = std::min(block.first_level, 0);
      block.last_level = std::max(block.last_level, 0);
    }
    block.levels.push_back(static_cast<std::int32_t>(level));
    block.decoded.push_back((level + offset) * block.step);
  }
  return block;
}

}  // namespace cortado
