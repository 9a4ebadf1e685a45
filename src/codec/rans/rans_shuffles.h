// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Byte shuffles that move some of eight 16-bit lanes, for instruction sets that can't compress or expand them.
#pragma once

#include <array>
#include <cstdint>

namespace cortado {

struct alignas(16) LaneShuffle {
  std::uint8_t bytes[16];
};
using LaneShuffles = std::array<LaneShuffle, 256>;  // one for each set of lanes

// The lanes of the set go to the top, in their order; what lies below is any of them.
constexpr LaneShuffles make_pack_to_top() {
  LaneShuffles shuffles = {};
  for (unsigned set = 0; set < 256; ++set) {
    unsigned to = 8;
    for (unsigned lane = 8; lane-- > 0;) {
      if ((set >> lane & 1) == 0) continue;
      --to;
      shuffles[set].bytes[2 * to] = static_cast<std::uint8_t>(2 * lane);
      shuffles[set].bytes[2 * to + 1] = static_cast<std::uint8_t>(2 * lane + 1);
    }
  }
  return shuffles;
}

// The lanes of the set get the lowest lanes in turn, the others any.
constexpr LaneShuffles make_spread() {
  LaneShuffles shuffles = {};
  for (unsigned set = 0; set < 256; ++set) {
    unsigned from = 0;
    for (unsigned lane = 0; lane < 8; ++lane) {
      if ((set >> lane & 1) == 0) continue;
      shuffles[set].bytes[2 * lane] = static_cast<std::uint8_t>(2 * from);
      shuffles[set].bytes[2 * lane + 1] = static_cast<std::uint8_t>(2 * from + 1);
      ++from;
    }
  }
  return shuffles;
}

inline constexpr LaneShuffles kPackToTop = make_pack_to_top();
inline constexpr LaneShuffles kSpread = make_spread();

}  // namespace cortado
