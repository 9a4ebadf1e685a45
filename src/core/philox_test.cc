// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/philox.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

namespace cortado {
namespace {

TEST(Philox, GivesThePublishedKnownAnswers) {
  // kat_vectors of Random123, the lines of philox4x32 with 10 rounds.
  constexpr std::uint32_t kOnes = 0xffffffffu;
  EXPECT_EQ(philox4x32_10({0, 0, 0, 0}, {0, 0}), (PhiloxBlock{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox4x32_10({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (PhiloxBlock{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32_10({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (PhiloxBlock{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, EveryPartOfTheKeyCounts) {
  constexpr std::uint64_t kHigh = 1ull << 40;
  std::set<PhiloxBlock> blocks;
  for (const std::uint64_t delta : {std::uint64_t{1}, kHigh}) {
    blocks.insert(philox_block(7 + delta, 8, 9, 10));
    blocks.insert(philox_block(7, 8 + delta, 9, 10));
    blocks.insert(philox_block(7, 8, 9 + delta, 10));
    blocks.insert(philox_block(7, 8, 9, 10 + delta));
  }
  blocks.insert(philox_block(7, 8, 9, 10));
  EXPECT_EQ(blocks.size(), 9u);
}

TEST(Philox, BlocksAreNumberedWithinAStepOfATensor) {
  const PhiloxKey key = philox_key(1, 2);
  EXPECT_EQ(philox_block(1, 0x300000004ull, 2, 0x500000006ull), philox4x32_10({6, 5, 4, 3}, key));
}

TEST(Philox, NormalValuesHaveFixedBits) {
  // Golden: all machines must draw these.
  float values[5];
  philox_fill_normal(1, 2, 3, values, 5);
  const float expected[] = {0x1.609f06p-1f, 0x1.2c732ep+0f, -0x1.5199dep-1f, 0x1.b0e78ap-3f, -0x1.050bb8p+0f};
  for (int i = 0; i < 5; ++i) EXPECT_EQ(values[i], expected[i]) << "value " << i;
}

TEST(Philox, AShorterFillIsAPrefix) {
  std::vector<float> all(101), part(50);
  philox_fill_normal(1, 2, 3, all.data(), 101);
  philox_fill_normal(1, 2, 3, part.data(), 50);
  EXPECT_TRUE(std::equal(part.begin(), part.end(), all.begin()));
  philox_fill_normal(1, 2, 3, nullptr, 0);
}

TEST(Philox, NormalValuesHaveMean0AndVariance1) {
  constexpr std::int64_t kElems = 1 << 20;
  std::vector<float> values(kElems);
  philox_fill_normal(42, 0, 0, values.data(), kElems);
  double sum = 0, squares = 0, largest = 0;
  for (const float x : values) {
    sum += x;
    squares += static_cast<double>(x) * x;
    largest = std::max(largest, std::abs(static_cast<double>(x)));
  }
  EXPECT_NEAR(sum / kElems, 0, 5.0 / std::sqrt(kElems));
  EXPECT_NEAR(squares / kElems, 1, 7.0 / std::sqrt(kElems));
  EXPECT_LT(largest, 3.47);
}

}  // namespace
}  // namespace cortado
