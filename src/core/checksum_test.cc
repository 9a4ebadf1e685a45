// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/checksum.h"

#include <gtest/gtest.h>

#include <string_view>
#include <vector>

namespace cortado {
namespace {

std::uint64_t checksum_of(std::string_view text) { return checksum_64(std::as_bytes(std::span(text))); }

// Published values of XXH64 with seed 0.
TEST(Checksum, GivesThePublishedValues) {
  EXPECT_EQ(checksum_of(""), 0xef46db3751d8e999u);
  EXPECT_EQ(checksum_of("a"), 0xd24ec4f1a98c6e5bu);
  EXPECT_EQ(checksum_of("abc"), 0x44bc2cf5ad770999u);
  EXPECT_EQ(checksum_of("xxhash"), 0x32dd38952c4bc720u);
  EXPECT_EQ(checksum_of("Nobody inspects the spammish repetition"), 0xfbcea83c8a378bf1u);
}

TEST(Checksum, SeesEveryBitOfEverySize) {
  for (std::size_t size = 1; size <= 100; ++size) {
    std::vector<std::byte> bytes(size + 1);
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(31 * i);
    const std::span<const std::byte> odd_place(bytes.data() + 1, size);
    const std::uint64_t before = checksum_64(odd_place);
    for (std::size_t bit = 0; bit < 8 * size; ++bit) {
      std::byte& changed = bytes[1 + bit / 8];
      changed ^= std::byte{1} << (bit % 8);
      EXPECT_NE(checksum_64(odd_place), before) << "bit " << bit << " of " << size << " bytes";
      changed ^= std::byte{1} << (bit % 8);
    }
  }
}

// Sign bits of two floats in one lane: what a sum of words would miss.
TEST(Checksum, TwoSignsDoNotCancel) {
  std::vector<float> values(64, 1.5f);
  const std::uint64_t before = checksum_64(std::as_bytes(std::span(values)));
  values[1] = values[9] = -1.5f;
  EXPECT_NE(checksum_64(std::as_bytes(std::span(values))), before);
}

}  // namespace
}  // namespace cortado
