// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "feedback/feedback_pass.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "core/float16.h"
#include "core/philox.h"

namespace cortado::feedback_pass_test {
namespace {

constexpr std::int64_t kElems = 2500;  // three chunks, the last one partial

std::vector<float> normal(std::uint64_t seed) {
  std::vector<float> values(kElems);
  philox_fill_normal(seed, 0, 0, values.data(), kElems);
  return values;
}

FeedbackPass pass_over(const std::vector<float>& gradient, float momentum = 0) {
  return {.elems = kElems, .gradient = gradient.data(), .gradient_scale = 0.25f, .momentum = momentum};
}

TEST(FeedbackPass, AddsTheScaledGradientToTheSameOrToOtherMemory) {
  const std::vector<float> gradient = normal(1), before = normal(2);
  std::vector<float> other(kElems), same = before;
  std::vector<float> kept = before;
  EXPECT_TRUE(add_gradient(pass_over(gradient), {.residual = kept.data()}, {.residual = other.data()}));
  EXPECT_TRUE(add_gradient(pass_over(gradient), {.residual = same.data()}, {.residual = same.data()}));
  EXPECT_EQ(kept, before);
  EXPECT_EQ(same, other);
  for (std::int64_t i = 0; i < kElems; ++i) EXPECT_EQ(same[i], before[i] + gradient[i] * 0.25f);
}

TEST(FeedbackPass, ReadsNarrowGradients) {
  const std::vector<float> values = normal(3);
  std::vector<std::uint16_t> narrow(kElems);
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (std::int64_t i = 0; i < kElems; ++i) {
      narrow[i] = dtype == DType::kFloat16 ? float_to_fp16(values[i]) : float_to_bf16(values[i]);
    }
    std::vector<float> residual(kElems);
    const FeedbackPass pass{.elems = kElems, .gradient = narrow.data(), .dtype = dtype};
    EXPECT_TRUE(add_gradient(pass, {.residual = residual.data()}, {.residual = residual.data()}));
    for (std::int64_t i = 0; i < kElems; ++i) {
      EXPECT_EQ(residual[i], dtype == DType::kFloat16 ? fp16_to_float(narrow[i]) : bf16_to_float(narrow[i]));
    }
  }
}

TEST(FeedbackPass, WhatIsNotFiniteIsSeenAndNotAdded) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity(), 3e38f}) {
    std::vector<float> gradient = normal(4);
    gradient[2001] = bad;
    const std::vector<float> before = normal(5), velocity_before = normal(6);
    for (const bool moves : {false, true}) {
      std::vector<float> residual = before, velocity = velocity_before;
      const FeedbackMemory memory{residual.data(), moves ? velocity.data() : nullptr};
      EXPECT_FALSE(add_gradient(pass_over(gradient, 0.9f), memory, memory));
      EXPECT_EQ(residual[2001], before[2001]);
      EXPECT_EQ(velocity[2001], velocity_before[2001]);
      EXPECT_NE(residual[2000], before[2000]);
      take_back(pass_over(gradient, 0.9f), memory, memory);
      for (std::int64_t i = 0; i < kElems; ++i) {
        EXPECT_NEAR(residual[i], before[i], 2e-6) << i;
        EXPECT_NEAR(velocity[i], velocity_before[i], 2e-6) << i;
      }
    }
  }
}

// To other memory, and where the gradient is narrow, with the same bits.
TEST(FeedbackPass, TakesBackToWhereItIsAsked) {
  const std::vector<float> values = normal(8);
  std::vector<std::uint16_t> narrow(kElems);
  for (std::int64_t i = 0; i < kElems; ++i) narrow[i] = float_to_bf16(values[i]);
  const FeedbackPass pass{.elems = kElems, .gradient = narrow.data(), .dtype = DType::kBFloat16, .momentum = 0.9f};
  for (const bool moves : {false, true}) {
    std::vector<float> residual = normal(9), velocity = normal(10), other(kElems), other_velocity(kElems);
    const std::vector<float> added = residual, added_velocity = velocity;
    const FeedbackMemory memory{residual.data(), moves ? velocity.data() : nullptr};
    take_back(pass, memory, {other.data(), moves ? other_velocity.data() : nullptr});
    EXPECT_EQ(residual, added);
    EXPECT_EQ(velocity, added_velocity);
    take_back(pass, memory, memory);
    EXPECT_EQ(other, residual);
    EXPECT_NE(other, added);
    EXPECT_EQ(other_velocity, moves ? velocity : std::vector<float>(kElems));
  }
}

TEST(FeedbackPass, TakingBackAnExplodedGradientLeavesNoGarbage) {
  std::vector<float> gradient(kElems, 1e25f), residual = normal(7);
  const FeedbackMemory memory{.residual = residual.data()};
  ASSERT_TRUE(add_gradient(pass_over(gradient), memory, memory));
  take_back(pass_over(gradient), memory, memory);
  for (const float value : residual) EXPECT_EQ(value, 0.0f);
}

// Three steps of momentum correction and masking against the formulas, value by value.
TEST(FeedbackPass, VelocityFollowsTheFormulasOfDgc) {
  std::vector<float> residual(kElems), velocity(kElems), v(kElems), u(kElems);
  const FeedbackMemory memory{residual.data(), velocity.data()};
  for (std::uint64_t step = 0; step < 3; ++step) {
    const std::vector<float> gradient = normal(10 + step);
    ASSERT_TRUE(add_gradient(pass_over(gradient, 0.9f), memory, memory));
    std::vector<float> sent(kElems);
    double of_values = 0, of_differences = 0;
    for (std::int64_t i = 0; i < kElems; ++i) {
      u[i] = 0.9f * u[i] + gradient[i] * 0.25f;
      v[i] += u[i];
      of_values += v[i] * v[i];
      const bool is_sent = (i + static_cast<std::int64_t>(step)) % 3 == 0;
      if (is_sent) sent[i] = v[i];
      if (is_sent) u[i] = v[i] = 0;
      of_differences += v[i] * v[i];
    }
    const DifferenceSquares squares = subtract_sent(sent.data(), kElems, memory);
    EXPECT_EQ(residual, v);
    EXPECT_EQ(velocity, u);
    EXPECT_NEAR(squares.of_values, of_values, 1e-5 * of_values);
    EXPECT_NEAR(squares.of_differences, of_differences, 1e-5 * of_values);
  }
}

TEST(FeedbackPass, WhatWasSentRoundedIsOwed) {
  std::vector<float> residual = normal(8), sent(kElems);
  const std::vector<float> wanted = residual;
  for (std::int64_t i = 0; i < kElems; ++i) sent[i] = std::round(wanted[i]);
  const DifferenceSquares compared = compare_sent(wanted.data(), DType::kFloat32, sent.data(), DType::kFloat32, kElems);
  const DifferenceSquares squares = subtract_sent(sent.data(), kElems, {.residual = residual.data()});
  EXPECT_EQ(squares.of_values, compared.of_values);
  EXPECT_EQ(squares.of_differences, compared.of_differences);
  for (std::int64_t i = 0; i < kElems; ++i) EXPECT_EQ(residual[i] + sent[i], wanted[i]);
}

}  // namespace
}  // namespace cortado::feedback_pass_test
