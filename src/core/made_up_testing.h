// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// For tests: values that look like gradients and cost next to nothing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cortado {

// Different for each rank, step and tensor, of full rank as a matrix: near normal, of variance 1. The sum of the four
// uniform numbers in a mixed word (the last steps of SplitMix64, prng.di.unimi.it).
inline float made_up_value(int rank, std::int64_t step, std::size_t tensor, std::size_t i) {
  std::uint64_t word = static_cast<std::uint64_t>(i) | static_cast<std::uint64_t>(tensor & 0xff) << 32 |
                       static_cast<std::uint64_t>(rank & 0xff) << 40 | static_cast<std::uint64_t>(step + 1) << 48;
  word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9u;
  word = (word ^ word >> 27) * 0x94d049bb133111ebu;
  word ^= word >> 31;
  const auto part = [word](int shift) { return static_cast<int>(word >> shift & 0xffff); };
  return static_cast<float>(part(0) + part(16) + part(32) + part(48) - 2 * 0xffff) * (1.7320508f / 0x10000);
}

}  // namespace cortado
