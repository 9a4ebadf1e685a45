// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/crc32.h"

#include <gtest/gtest.h>

#include <string_view>

namespace cortado {
namespace {

TEST(Crc32, TheCheckValueOfTheStandardAndOfNothing) {
  constexpr std::string_view kCheck = "123456789";
  EXPECT_EQ(crc32_of(std::as_bytes(std::span(kCheck))), 0xcbf43926u);
  EXPECT_EQ(crc32_of({}), 0u);
}

}  // namespace
}  // namespace cortado
