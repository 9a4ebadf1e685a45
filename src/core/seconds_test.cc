// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/seconds.h"

#include <gtest/gtest.h>

#include <cmath>

namespace cortado {
namespace {

TEST(Seconds, AreNanoseconds) {
  EXPECT_EQ(from_seconds(0), std::chrono::nanoseconds(0));
  EXPECT_EQ(from_seconds(0.001), std::chrono::milliseconds(1));
  EXPECT_EQ(from_seconds(1800), std::chrono::minutes(30));
  const std::chrono::hours two_centuries(24 * 365 * 200);
  EXPECT_GT(from_seconds(1e300), two_centuries);
  EXPECT_LT(from_seconds(-1e300), -two_centuries);
  EXPECT_GT(from_seconds(std::nan("")), two_centuries);
}

}  // namespace
}  // namespace cortado
