// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What the scale of a block is and decodes to: shared by the codec, its kernels and the device variant.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/device.h"

namespace cortado {

enum class SignScale { kMeanAbs, kTwoMeans, kNone };

// What a block decodes to: where the bit is 0, and where it is 1.
struct SignLevels {
  float positive;
  float negative;
};

// Sums of a block: parts of so many values in 16 lanes each; part p is added to sum p mod kSignSums.
constexpr std::int64_t kSignPartElems = 1024;
constexpr std::int64_t kSignSums = 256;

constexpr std::int64_t sign_scale_bytes(SignScale scale) { return scale == SignScale::kTwoMeans ? 8 : 4; }
constexpr std::int64_t sign_blocks(std::int64_t elems, std::int64_t block_elems) {
  return elems / block_elems + (elems % block_elems != 0);
}

constexpr std::uint32_t kSignNan = 0x7fc00000u;

// Any NaN becomes the one of the specification: which one an addition gives depends on the machine.
CORTADO_HD inline float sign_mean(double sum, std::int64_t count) {
  const auto mean = static_cast<float>(sum / static_cast<double>(count < 1 ? 1 : count));
  return mean != mean ? std::bit_cast<float>(kSignNan) : mean;
}

// The one scale of kNone, from the mean magnitude.
CORTADO_HD inline float sign_of_mean(float mean) {
  const bool is_finite = (std::bit_cast<std::uint32_t>(mean) & 0x7f800000u) != 0x7f800000u;
  return is_finite ? 1.0f : std::bit_cast<float>(kSignNan);
}

// The levels of one block, from its scale in a payload.
CORTADO_HD inline SignLevels read_sign_levels(const std::byte* scales, std::int64_t block, SignScale scale) {
  float read[2] = {};
  const std::int64_t bytes = sign_scale_bytes(scale);
  memcpy(&read[0], scales + block * bytes, sizeof(float));
  if (scale == SignScale::kTwoMeans) memcpy(&read[1], scales + block * bytes + 4, sizeof(float));
  return {read[0], scale == SignScale::kTwoMeans ? read[1] : -read[0]};
}

// What sums of magnitudes give: nothing below zero, and one NaN only.
CORTADO_HD inline bool is_sign_mean(float value, float sign) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return bits == 0 || value * sign > 0 || (bits == kSignNan && sign > 0);
}

CORTADO_HD inline bool is_sign_scale(SignLevels levels, SignScale scale) {
  switch (scale) {
    case SignScale::kMeanAbs:
      return is_sign_mean(levels.positive, 1);
    case SignScale::kTwoMeans:
      return is_sign_mean(levels.positive, 1) && is_sign_mean(levels.negative, -1);
    case SignScale::kNone:
      return levels.positive == 1 || std::bit_cast<std::uint32_t>(levels.positive) == kSignNan;
  }
  return false;
}

}  // namespace cortado
