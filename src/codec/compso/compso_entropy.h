// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Where sections of a message end: bits of codes with tables apart and with one for all. By IEEE operations alone and
// in a fixed order, so that every machine cuts sections at the same places.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "core/device.h"

namespace cortado {

// Codes that are counted together; at the end of a layer a unit may be as small as kLeastUnitCodes.
constexpr std::int64_t kUnitCodes = 65536;
constexpr std::int64_t kLeastUnitCodes = 32768;

// log2(x), x >= 1, to 1e-9, without a branch, as counts are hard to predict.
CORTADO_HD inline double log2_of(double x) {
  constexpr std::uint64_t kBitsOfSqrtHalf = 0x3fe6a09e667f3bcd;
  constexpr double kTwoOverLn2 = 2.8853900817779268;
  const auto bits = std::bit_cast<std::uint64_t>(x);
  const std::uint64_t exponent = (bits - kBitsOfSqrtHalf) >> 52;
  const auto m = std::bit_cast<double>(bits - (exponent << 52));  // from sqrt(1/2) to sqrt(2)
  const double z = (m - 1) / (m + 1), zz = z * z;                 // log m = 2 (z + z^3 / 3 + ...)
  const double series = 1 + zz * (1.0 / 3 + zz * (1.0 / 5 + zz * (1.0 / 7 + zz * (1.0 / 9))));
  return static_cast<double>(static_cast<std::int64_t>(exponent)) + kTwoOverLn2 * z * series;
}

// x log2(x), 0 for 0.
CORTADO_HD inline double bits_of_count(std::uint64_t count) {
  const auto x = static_cast<double>(count);
  return x * log2_of(x < 1 ? 1.0 : x);
}

// What another section takes, of codes with symbols first ... last: its head, table, directory and coder states.
CORTADO_HD inline double section_cost_bits(std::size_t first, std::size_t last) {
  constexpr double kHeadBytes = 160, kBytesASymbol = 1.5;
  return 8 * (kHeadBytes + kBytesASymbol * static_cast<double>(last - first + 1));
}

}  // namespace cortado
