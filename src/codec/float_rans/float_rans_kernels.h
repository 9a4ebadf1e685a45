// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Floats to the byte that is worth coding and the rest, and back. Every value is rotated left by one bit first, which
// brings the sign to the bottom and the exponent (fp16: with three bits of the mantissa) into the upper byte.
//
// Preconditions: elems >= 0; nothing overlaps. Pointers need no alignment.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cortado {

// `rest` is 3 * elems bytes: the lower halves of the rotated values, then the third byte of each.
void split_floats_32(const std::byte* values, std::int64_t elems, std::uint8_t* codes, std::byte* rest);
void merge_floats_32(const std::uint8_t* codes, const std::byte* rest, std::int64_t elems, std::byte* values);

// `rest` is elems bytes: the lower byte of each.
void split_floats_16(const std::byte* values, std::int64_t elems, std::uint8_t* codes, std::byte* rest);
void merge_floats_16(const std::uint8_t* codes, const std::byte* rest, std::int64_t elems, std::byte* values);

}  // namespace cortado
