// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Sizes of the index section of sparse payloads: for the codec and its device variant.
#pragma once

#include <cstdint>

#include "core/device.h"

namespace cortado {

enum class IndexKind : std::uint8_t { kSmaller = 0, kDelta = 1, kBitmap = 2 };  // sections are one of the latter two

constexpr std::uint64_t kIndexHeaderBytes = 9;

CORTADO_HD constexpr std::uint64_t bytes_of_bits(std::int64_t bits) { return static_cast<std::uint64_t>(bits + 7) / 8; }

// The most lower bits of a gap that are written as they are.
constexpr int kMostRiceBits = 24;

// Bits of the longest section: the upper parts of the gaps, which sum up to at most elems - kept, cannot have more.
CORTADO_HD constexpr std::int64_t most_delta_bits(std::int64_t elems, std::int64_t kept, int bits) {
  return kept * (bits + 1) + ((elems - kept) >> bits);
}

CORTADO_HD constexpr std::uint64_t max_unary_bytes(std::int64_t elems, std::int64_t kept, int bits) {
  return bytes_of_bits(kept + ((elems - kept) >> bits));
}

// The bits of a gap that are written as they are; the rest is written in unary. What makes the longest possible
// section of `kept` positions among `elems` shortest.
CORTADO_HD constexpr int rice_bits(std::int64_t elems, std::int64_t kept) {
  int bits = 0;
  while (bits < kMostRiceBits && most_delta_bits(elems, kept, bits + 1) < most_delta_bits(elems, kept, bits)) ++bits;
  return bits;
}

}  // namespace cortado
