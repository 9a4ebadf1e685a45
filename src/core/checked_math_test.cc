// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/checked_math.h"

#include <gtest/gtest.h>

#include <limits>

namespace cortado {
namespace {

constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();

TEST(CheckedMath, SumsAndProductsThatFit) {
  EXPECT_EQ(checked_add<std::int64_t>(kLargest - 1, 1), kLargest);
  EXPECT_EQ(checked_mul<std::int64_t>(kLargest, -1), -kLargest);
  EXPECT_EQ(checked_mul<std::uint64_t>(1ull << 32, (1ull << 32) - 1), ~0ull << 32);
}

TEST(CheckedMath, OverflowsAreNothing) {
  EXPECT_EQ(checked_add<std::int64_t>(kLargest, 1), std::nullopt);
  EXPECT_EQ(checked_mul<std::int64_t>(1ll << 32, 1ll << 31), std::nullopt);
  EXPECT_EQ(checked_add<std::uint64_t>(~0ull, 1), std::nullopt);
}

TEST(CheckedMath, SizesOfTensors) {
  EXPECT_EQ(checked_elems(3, 5), 15);
  EXPECT_EQ(checked_elems(0, kLargest), 0);
  EXPECT_EQ(checked_elems(-1, -5), std::nullopt);
  EXPECT_EQ(checked_elems(1, -5), std::nullopt);
  EXPECT_EQ(checked_size_bytes(1ll << 31, 2, DType::kFloat32), 1ll << 34);
  EXPECT_EQ(checked_size_bytes(kLargest, 1, DType::kUint8), kLargest);
  EXPECT_EQ(checked_size_bytes(kLargest, 1, DType::kFloat16), std::nullopt);
  EXPECT_EQ(checked_size_bytes(1, 1, static_cast<DType>(9)), std::nullopt);
}

TEST(CheckedMath, CappedSumsStayAtTheLargest) {
  EXPECT_EQ(capped_add(2, 3), 5);
  EXPECT_EQ(capped_add(INT64_MAX - 1, 1), INT64_MAX);
  EXPECT_EQ(capped_add(INT64_MAX, 1), INT64_MAX);
  EXPECT_EQ(capped_add(INT64_MAX, INT64_MAX), INT64_MAX);
}

}  // namespace
}  // namespace cortado
