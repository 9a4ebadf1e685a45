// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Codes of 1 to 8 bits, one a byte in memory, to bits and back. Every 128 codes are 16 lanes: lane j is the stream of
// codes j, 16 + j, 32 + j ..., the first in the lowest bits, and byte t of lane j lies at 16 t + j, so that 16 codes a
// row move at once and codes of 8 bits stay where they are. The last codes, fewer than 128, are one plain bit stream.
//
// Preconditions: 1 <= bits <= 8; codes < 2^bits; `codes` has `elems` bytes, `packed` packed_bytes() of them. No
// alignment asked. The same bytes on every SIMD target.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cortado {

constexpr std::int64_t kPackedGroupElems = 128;

// elems * bits / 8, rounded up. elems <= 2^62.
constexpr std::uint64_t packed_bytes(std::int64_t elems, int bits) {
  const auto whole = static_cast<std::uint64_t>(elems / 8), rest = static_cast<std::uint64_t>(elems % 8);
  return whole * static_cast<unsigned>(bits) + (rest * static_cast<unsigned>(bits) + 7) / 8;
}

// What is left of the last byte is 0.
void pack_codes(const std::uint8_t* codes, std::int64_t elems, int bits, std::byte* packed);

struct UnpackedCodes {
  std::uint8_t largest;  // 0 if there are no codes
  bool rest_is_zero;     // what is left of the last byte
};
UnpackedCodes unpack_codes(const std::byte* packed, std::int64_t elems, int bits, std::uint8_t* codes);

// 0 if there are none.
std::uint8_t largest_of_codes(const std::uint8_t* codes, std::int64_t elems);

}  // namespace cortado
