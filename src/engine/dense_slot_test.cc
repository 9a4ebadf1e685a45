// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "engine/dense_slot.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/aligned_buffer.h"
#include "core/streaming.h"

namespace cortado {
namespace {

// Large gradients are written past the caches, from the first cache line on; pieces of them are not.
TEST(DenseSlot, LargeGradientsHaveTheBytesOfTheirPieces) {
  constexpr int kRanks = 3;
  constexpr std::int64_t kPiece = 1000;
  const std::int64_t elems = kLeastStreamedGradientBytes / static_cast<std::int64_t>(sizeof(float)) + 21;
  std::vector<std::uint16_t> slot(static_cast<std::size_t>(elems));
  for (std::size_t i = 0; i < slot.size(); ++i) slot[i] = static_cast<std::uint16_t>(i * 40503u % 0x7c01u);  // no NaN
  AlignedBuffer<float> output(slot.size() + 17);
  std::vector<float> expected(slot.size());
  for (const DType wire : {DType::kFloat16, DType::kBFloat16}) {
    for (std::int64_t at = 0; at < elems; at += kPiece) {
      read_dense_slot(slot.data() + at, wire, std::min(kPiece, elems - at), kRanks, expected.data() + at,
                      DType::kFloat32);
    }
    EXPECT_GT(*std::max_element(expected.begin(), expected.end()), 1e4);
    for (const std::ptrdiff_t past_line : {0, 1, 15}) {
      float* begin = output.data() + past_line;
      std::fill_n(begin, elems + 1, -1.0f);
      read_dense_slot(slot.data(), wire, elems, kRanks, begin, DType::kFloat32);
      EXPECT_EQ(std::memcmp(begin, expected.data(), slot.size() * sizeof(float)), 0) << past_line;
      EXPECT_EQ(begin[elems], -1.0f);
    }
  }
}

}  // namespace
}  // namespace cortado
