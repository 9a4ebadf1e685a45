// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/aligned_buffer.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace cortado {
namespace {

TEST(AlignedBuffer, HoldsZerosOnACacheLine) {
  for (const std::size_t elems : {std::size_t{1}, std::size_t{7}, std::size_t{4097}}) {
    const AlignedBuffer<float> buffer(elems);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % 64, 0u);
    EXPECT_EQ(buffer.size(), elems);
    EXPECT_TRUE(std::all_of(buffer.begin(), buffer.end(), [](float x) { return x == 0; }));
  }
}

TEST(AlignedBuffer, EmptyOnesOwnNothing) {
  EXPECT_EQ(AlignedBuffer<float>().data(), nullptr);
  EXPECT_EQ(AlignedBuffer<float>(0).data(), nullptr);
  EXPECT_TRUE(AlignedBuffer<std::byte>(0).span().empty());
}

TEST(AlignedBuffer, MovingLeavesAnEmptyOne) {
  AlignedBuffer<int> a(3);
  a[2] = 5;
  AlignedBuffer<int> b(std::move(a));
  EXPECT_EQ(b.span().back(), 5);
  EXPECT_TRUE(a.empty());  // NOLINT: what is left behind is part of the contract
  a = std::move(b);
  EXPECT_EQ(a[2], 5);
  EXPECT_EQ(b.size(), 0u);  // NOLINT
}

}  // namespace
}  // namespace cortado
