// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// spec.md as code, one value at a time: what the kernels are compared with.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "codec/quant/quant_grid.h"
#include "core/philox.h"

namespace cortado::reference {

using Bytes = std::vector<std::byte>;

// u of value i: a byte of the block that 16 values of its lane share, centred.
inline float uniform(const RandomKey& random, std::int64_t i) {
  const auto lane = static_cast<std::uint64_t>(i % 16), row = static_cast<std::uint64_t>(i / 16 % 16);
  const std::uint64_t block = static_cast<std::uint64_t>(i / 256) * 16 + lane;
  const PhiloxBlock words =
      philox4x32_10({static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32),
                     static_cast<std::uint32_t>(random.step), static_cast<std::uint32_t>(random.step >> 32)},
                    random.key);
  const std::uint32_t byte = words[row / 4] >> (row % 4 * 8) & 0xffu;
  return (static_cast<float>(byte) + 0.5f) / 256 - 0.5f;
}

inline double sum_squares(std::span<const float> values, std::uint32_t max_magnitude) {
  const std::uint32_t exponent = std::clamp(max_magnitude >> 23, 2u, 252u);
  float lanes[16] = {};
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float v = values[i] * std::bit_cast<float>((254u - exponent) << 23);
    lanes[i % 16] += v * v;
  }
  double sums[16];
  std::copy(lanes, lanes + 16, sums);
  for (int apart = 8; apart > 0; apart /= 2)
    for (int i = 0; i < apart; ++i) sums[i] += sums[i + apart];
  const double unit = std::bit_cast<float>(exponent << 23);
  return sums[0] * unit * unit;
}

inline BlockStats stats_of(std::span<const float> values) {
  BlockStats stats;
  for (std::size_t first = 0; first < values.size(); first += 1024) {
    const auto part = values.subspan(first, std::min<std::size_t>(1024, values.size() - first));
    std::uint32_t max_magnitude = 0;
    for (const float v : part) {
      max_magnitude = std::max(max_magnitude, std::bit_cast<std::uint32_t>(v) & 0x7fffffffu);
      stats.low = std::min(stats.low, v);
      stats.high = std::max(stats.high, v);
    }
    stats.max_magnitude = std::max(stats.max_magnitude, max_magnitude);
    stats.squares += sum_squares(part, max_magnitude);
  }
  return stats;
}

inline std::vector<BlockGrid> grids_of(const QuantRule& s, std::span<const float> values, float tensor_step,
                                       float largest_value) {
  std::vector<BlockGrid> grids;
  const auto block_elems = static_cast<std::size_t>(s.block_elems);
  for (std::size_t first = 0; first < values.size(); first += block_elems) {
    const auto block = values.subspan(first, std::min(block_elems, values.size() - first));
    grids.push_back(
        block_grid(s, stats_of(block), static_cast<std::int64_t>(block.size()), tensor_step, largest_value));
  }
  return grids;
}

inline std::uint8_t code_of(const QuantRule& s, const BlockGrid& grid, float value, float u) {
  const float largest = s.largest_level(), shift = s.bits == 1 ? 0.5f : 0.0f;
  if (std::isnan(grid.step)) value = 0;
  value = std::clamp(value, -grid.reach, grid.reach);
  float q = value * grid.inverse;
  if (s.filter >= 0 && std::fabs(value) <= grid.threshold) q = 0;
  q = std::clamp(q, -largest, largest);
  if (s.rounding == Rounding::kNearest) q -= shift;
  if (s.rounding == Rounding::kDeadZone) q -= std::copysign(0.15f, q);
  if (s.rounding == Rounding::kStochastic || s.rounding == Rounding::kDither) q += u - shift;
  return static_cast<std::uint8_t>(std::nearbyintf(q) + largest + shift);
}

inline float value_of(const QuantRule& s, float step, std::uint8_t code, float u) {
  float level = static_cast<float>(code) - s.largest_level();
  if (s.rounding == Rounding::kDeadZone && level != 0) level += std::copysign(0.05f, level);
  if (s.rounding == Rounding::kDither) level -= u;
  return level * step;
}

// Where bit `bit` of code i lies.
inline std::int64_t bit_position(std::int64_t elems, int bits, std::int64_t i, int bit) {
  const std::int64_t group = i / 128;
  if (bits == 8 || group == elems / 128) return i * bits + bit;
  const std::int64_t in_lane = i % 128 / 16 * bits + bit;
  return 8 * (group * 16 * bits + in_lane / 8 * 16 + i % 16) + in_lane % 8;
}

inline Bytes packed(std::span<const std::uint8_t> codes, int bits) {
  const auto elems = static_cast<std::int64_t>(codes.size());
  Bytes bytes(static_cast<std::size_t>((elems * bits + 7) / 8));
  for (std::int64_t i = 0; i < elems; ++i) {
    for (int bit = 0; bit < bits; ++bit) {
      const std::int64_t position = bit_position(elems, bits, i, bit);
      if (codes[static_cast<std::size_t>(i)] >> bit & 1) {
        bytes[static_cast<std::size_t>(position / 8)] |= std::byte{1} << position % 8;
      }
    }
  }
  return bytes;
}

inline std::vector<std::uint8_t> codes_of(const QuantRule& s, std::span<const float> values,
                                          std::span<const BlockGrid> grids, const RandomKey& random) {
  std::vector<std::uint8_t> codes;
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(values.size()); ++i) {
    const BlockGrid& grid = grids[static_cast<std::size_t>(i / s.block_elems)];
    codes.push_back(code_of(s, grid, values[static_cast<std::size_t>(i)], uniform(random, i)));
  }
  return codes;
}

inline std::vector<float> values_of(const QuantRule& s, std::span<const std::uint8_t> codes,
                                    std::span<const BlockGrid> grids, const RandomKey& random) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(codes.size()); ++i) {
    const float step = grids[static_cast<std::size_t>(i / s.block_elems)].step;
    values.push_back(value_of(s, step, codes[static_cast<std::size_t>(i)], uniform(random, i)));
  }
  return values;
}

}  // namespace cortado::reference
