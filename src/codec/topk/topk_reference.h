// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// spec.md as the plainest program: what exact top-k keeps, and the index section bit by bit. For tests only.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "codec/topk/topk_index.h"

namespace cortado::reference {

inline std::uint32_t magnitude(float value) { return std::bit_cast<std::uint32_t>(value) & 0x7fffffffu; }

// Positions of the k largest magnitudes of values[first ... first + elems], ascending; of equal ones the first.
inline std::vector<std::int64_t> largest(const std::vector<float>& values, std::int64_t first, std::int64_t elems,
                                         std::int64_t k) {
  std::vector<std::int64_t> positions(static_cast<std::size_t>(elems));
  for (std::int64_t i = 0; i < elems; ++i) positions[static_cast<std::size_t>(i)] = first + i;
  const auto larger = [&](std::int64_t a, std::int64_t b) {
    const std::uint32_t of_a = magnitude(values[static_cast<std::size_t>(a)]);
    const std::uint32_t of_b = magnitude(values[static_cast<std::size_t>(b)]);
    return of_a != of_b ? of_a > of_b : a < b;
  };
  std::nth_element(positions.begin(), positions.begin() + (k - 1), positions.end(), larger);
  positions.resize(static_cast<std::size_t>(k));
  std::sort(positions.begin(), positions.end());
  return positions;
}

inline void push_bit(std::vector<bool>& bits, std::int64_t bit) { bits.push_back(bit != 0); }

inline void append_bits(std::vector<std::byte>& bytes, const std::vector<bool>& bits) {
  const std::size_t begin = bytes.size();
  bytes.resize(begin + (bits.size() + 7) / 8);
  for (std::size_t i = 0; i < bits.size(); ++i) {
    if (bits[i]) bytes[begin + i / 8] |= std::byte{1} << (i % 8);
  }
}

// The smallest b of 0 ... 24 for which k (b + 1) + floor((n - k) / 2^b) is smallest.
inline int rice_bits(std::int64_t n, std::int64_t k) {
  int best = 0;
  const auto cost = [&](int b) { return k * (b + 1) + (n - k) / (std::int64_t{1} << b); };
  for (int b = 1; b <= 24; ++b) best = cost(b) < cost(best) ? b : best;
  return best;
}

inline std::vector<std::byte> index_section(IndexKind kind, const std::vector<std::int64_t>& positions,
                                            std::int64_t elems) {
  const auto kept = static_cast<std::int64_t>(positions.size());
  if (kind == IndexKind::kSmaller) {
    std::vector<std::byte> delta = index_section(IndexKind::kDelta, positions, elems);
    const auto bitmap_bytes = 9 + static_cast<std::size_t>(elems + 7) / 8;
    return delta.size() <= bitmap_bytes ? delta : index_section(IndexKind::kBitmap, positions, elems);
  }
  std::vector<std::byte> section(9);
  section[0] = static_cast<std::byte>(kind);
  std::memcpy(section.data() + 1, &kept, sizeof(kept));
  if (kind == IndexKind::kBitmap) {
    std::vector<bool> bits(static_cast<std::size_t>(elems));
    for (const std::int64_t position : positions) bits[static_cast<std::size_t>(position)] = true;
    append_bits(section, bits);
    return section;
  }
  const int b = rice_bits(elems, kept);
  std::vector<bool> low, unary;
  std::int64_t next = 0;
  for (const std::int64_t position : positions) {
    const std::int64_t gap = position - next;
    next = position + 1;
    for (int bit = 0; bit < b; ++bit) push_bit(low, gap >> bit & 1);
    for (std::int64_t zero = 0; zero < gap >> b; ++zero) push_bit(unary, 0);
    push_bit(unary, 1);
  }
  append_bits(section, low);
  append_bits(section, unary);
  return section;
}

}  // namespace cortado::reference
