// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/differences.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/philox.h"
#include "core/simd_target.h"

namespace cortado {
namespace {

DifferenceSquares reference_of(const std::vector<float>& values, const std::vector<float>& decoded) {
  DifferenceSquares total;
  for (std::size_t begin = 0; begin < values.size(); begin += 1024) {
    float of_values[16] = {}, of_differences[16] = {};
    for (std::size_t i = begin; i < std::min(values.size(), begin + 1024); ++i) {
      const float difference = values[i] - decoded[i];
      of_values[i % 16] += values[i] * values[i];
      of_differences[i % 16] += difference * difference;
    }
    for (int k = 0; k < 16; ++k) {
      total.of_values += of_values[k];
      total.of_differences += of_differences[k];
    }
  }
  return total;
}

TEST(Differences, EveryInstructionSetAddsInOneOrder) {
  for (const std::int64_t target : simd_targets()) {
    const ForcedSimdTarget forced(target);
    SCOPED_TRACE(simd_target_name(target));
    for (const std::int64_t elems : {0, 1, 15, 16, 17, 1000, 1023, 1024, 1025, 5000}) {
      const auto count = static_cast<std::size_t>(elems);
      std::vector<float> values(count), decoded(count), lost(count + 1, 7.0f);
      philox_fill_normal(1, 0, 0, values.data(), elems);
      philox_fill_normal(1, 0, 1, decoded.data(), elems);
      const DifferenceSquares expected = reference_of(values, decoded);
      for (float* const kept : {lost.data(), static_cast<float*>(nullptr)}) {
        const DifferenceSquares squares = take_differences(values.data(), decoded.data(), elems, kept);
        EXPECT_EQ(squares.of_values, expected.of_values) << elems;
        EXPECT_EQ(squares.of_differences, expected.of_differences) << elems;
      }
      for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(lost[i], values[i] - decoded[i]) << i;
      EXPECT_EQ(lost[count], 7.0f) << "nothing is written behind the end";
      const DifferenceSquares in_place = take_differences(values.data(), decoded.data(), elems, values.data());
      EXPECT_EQ(in_place.of_values, expected.of_values) << elems;
      EXPECT_EQ(in_place.of_differences, expected.of_differences) << elems;
      lost.resize(count);
      EXPECT_EQ(values, lost) << elems;
    }
  }
}

// Their squares have no float: the error of such a gradient was 0, or no number.
TEST(Differences, LargeValuesHaveFiniteSquares) {
  for (const std::int64_t target : simd_targets()) {
    const ForcedSimdTarget forced(target);
    std::vector<float> values(1030, 1.0f), decoded(1030, 1.0f);
    values[3] = values[1027] = -3e30f;
    decoded[3] = -2e30f;
    std::vector<float> lost(values.size());
    for (float* const kept : {static_cast<float*>(nullptr), lost.data(), values.data()}) {
      const DifferenceSquares squares = take_differences(values.data(), decoded.data(), 1030, kept);
      EXPECT_NEAR(squares.of_values, 18e60, 1e55);
      EXPECT_NEAR(squares.of_differences, 10e60, 1e55);
    }
  }
}

// What a codec makes Inf of is lost, and no reason to know nothing of the rest.
TEST(Differences, ValuesThatAreDecodedToInfAreLost) {
  std::vector<float> values(1030, 1.0f), decoded(1030, 1.0f), lost(1030);
  values[3] = 1e6f;
  decoded[3] = std::numeric_limits<float>::infinity();
  for (float* const kept : {static_cast<float*>(nullptr), lost.data(), values.data()}) {
    const DifferenceSquares squares = take_differences(values.data(), decoded.data(), 1030, kept);
    EXPECT_TRUE(std::isfinite(squares.of_values) && squares.of_values >= 1029) << squares.of_values;
    EXPECT_EQ(squares.of_differences, std::numeric_limits<double>::infinity());
  }
}

}  // namespace
}  // namespace cortado
