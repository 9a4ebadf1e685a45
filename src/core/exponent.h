// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The exponent of a float32 as a number, for code that runs on a GPU as well.
#pragma once

#include <bit>
#include <cstdint>

#include "core/device.h"

namespace cortado {

// 2^exponent, for -126 ... 127; 0 for -127.
CORTADO_HD constexpr float power_of_two(int exponent) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(127 + exponent) << 23);
}

// Of a normal number, whatever its sign: 2^exponent <= |value| < 2^(exponent + 1).
CORTADO_HD constexpr int exponent_of(float value) {
  return static_cast<int>(std::bit_cast<std::uint32_t>(value) >> 23 & 0xffu) - 127;
}

}  // namespace cortado
