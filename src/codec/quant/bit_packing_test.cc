// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/quant/bit_packing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "codec/quant/quant_reference.h"
#include "core/simd_target.h"

namespace cortado {
namespace {

constexpr std::byte kGuard{0xa5};

std::vector<std::uint8_t> make_codes(std::int64_t elems, int bits) {
  std::vector<std::uint8_t> codes;
  for (std::int64_t i = 0; i < elems; ++i) {
    codes.push_back(static_cast<std::uint8_t>(philox_block(1, 0, 0, static_cast<std::uint64_t>(i))[0] >> (32 - bits)));
  }
  return codes;
}

// All widths, and lengths around whole groups; nothing is written behind.
TEST(BitPacking, GivesTheBytesOfTheReferenceAndTheCodesBack) {
  for (const std::int64_t target : simd_targets()) {
    const ForcedSimdTarget forced(target);
    SCOPED_TRACE(simd_target_name(target));
    for (int bits = 1; bits <= 8; ++bits) {
      for (const std::int64_t elems : {0, 1, 2, 7, 8, 9, 15, 16, 17, 127, 128, 129, 200, 255, 256, 257, 640, 1000}) {
        SCOPED_TRACE(std::to_string(bits) + " bits, " + std::to_string(elems) + " codes");
        const std::vector<std::uint8_t> codes = make_codes(elems, bits);
        const reference::Bytes expected = reference::packed(codes, bits);
        ASSERT_EQ(packed_bytes(elems, bits), expected.size());
        reference::Bytes packed(expected.size() + 1, kGuard);
        pack_codes(codes.data(), elems, bits, packed.data());
        EXPECT_EQ(packed.back(), kGuard);
        packed.pop_back();
        EXPECT_EQ(packed, expected);

        std::vector<std::uint8_t> again(codes.size() + 1, 0xa5);
        const UnpackedCodes unpacked = unpack_codes(packed.data(), elems, bits, again.data());
        EXPECT_TRUE(unpacked.rest_is_zero);
        EXPECT_EQ(unpacked.largest, elems == 0 ? 0 : *std::max_element(codes.begin(), codes.end()));
        EXPECT_EQ(largest_of_codes(codes.data(), elems), unpacked.largest);
        EXPECT_EQ(again.back(), 0xa5);
        again.pop_back();
        EXPECT_EQ(again, codes);
      }
    }
  }
}

TEST(BitPacking, SeesBitsBehindTheLastCode) {
  std::vector<std::uint8_t> codes(131);
  reference::Bytes packed = reference::packed(codes, 3);
  ASSERT_EQ(packed.size(), 50u);  // 3 * 131 = 393 bits; the last byte has one of them
  packed.back() = std::byte{0x01};
  EXPECT_TRUE(unpack_codes(packed.data(), 131, 3, codes.data()).rest_is_zero);
  packed.back() = std::byte{0x02};
  EXPECT_FALSE(unpack_codes(packed.data(), 131, 3, codes.data()).rest_is_zero);
}

TEST(BitPacking, SizesOfTensorsBeyond32Bits) {
  constexpr std::int64_t kElems = (std::int64_t{1} << 31) + 1;
  EXPECT_EQ(packed_bytes(kElems, 1), (std::uint64_t{1} << 28) + 1);
  EXPECT_EQ(packed_bytes(kElems, 8), static_cast<std::uint64_t>(kElems));
  EXPECT_EQ(packed_bytes(std::int64_t{1} << 62, 8), std::uint64_t{1} << 62);
}

}  // namespace
}  // namespace cortado
