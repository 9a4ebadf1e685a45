// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Steps of tensors whose values are not all searched; quant_test.cc and compso_test.cc have what comes of them.
#include "codec/quant/quant_search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/float16.h"
#include "core/philox.h"
#include "core/simd_target.h"

namespace cortado::quant_search_test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Rows of 700 values of very different size.
std::vector<float> heavy_values(std::int64_t elems) {
  std::vector<float> values(static_cast<std::size_t>(elems));
  philox_fill_normal(1, 0, 0, values.data(), elems);
  for (std::int64_t i = 0; i < elems; ++i) values[static_cast<std::size_t>(i)] *= static_cast<float>(1 + i / 700 % 9);
  return values;
}

// Of `values` as a grid without end decodes them.
double relative_error(const std::vector<float>& values, double step, const DeadZone& dead_zone) {
  double lost = 0, energy = 0;
  for (const float x : values) {
    const double q = std::fabs(x) / step, level = std::max(0.0, std::nearbyint(q - dead_zone.shift));
    lost += std::pow(q - (level > 0 ? level + dead_zone.outwards : 0), 2);
    energy += static_cast<double>(x) * x;
  }
  return step * std::sqrt(lost / energy);
}

// A tensor of `values` in memory that begins at an odd address.
struct Tensor {
  Tensor(const std::vector<float>& values, DType dtype)
      : bytes(values.size() * dtype_bytes(dtype) + 1),
        view(bytes.data() + 1, dtype, 1, static_cast<std::int64_t>(values.size())) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      std::byte* const to = bytes.data() + 1 + i * dtype_bytes(dtype);
      const std::uint16_t half = dtype == DType::kFloat16 ? float_to_fp16(values[i]) : float_to_bf16(values[i]);
      std::memcpy(to, dtype == DType::kFloat32 ? static_cast<const void*>(&values[i]) : &half, dtype_bytes(dtype));
      float seen = values[i];
      if (dtype == DType::kFloat16) seen = fp16_to_float(half);
      if (dtype == DType::kBFloat16) seen = bf16_to_float(half);
      as_seen.push_back(seen);
    }
  }

  std::vector<std::byte> bytes;
  std::vector<float> as_seen;
  ConstTensorView view;
};

// 65537 is the least of these; at 65792 stretches get longer.
TEST(QuantSearch, ErrorsOfLargeTensorsAreMetWithinTwoPerMille) {
  for (const std::int64_t elems : {65537, 65791, 65792, 200'003}) {
    const std::vector<float> values = heavy_values(elems);
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      const Tensor tensor(values, dtype);
      for (const double error : {0.5, 0.3, 0.1, 0.02}) {
        SCOPED_TRACE(std::to_string(elems) + " " + std::string(dtype_name(dtype)) + " " + std::to_string(error));
        const float nearest = find_step(Rounding::kNearest, error, tensor.view);
        EXPECT_NEAR(relative_error(tensor.as_seen, nearest, {.shift = 0, .outwards = 0}) / error, 1, 0.0021);
        const float step = find_step(Rounding::kDeadZone, error, tensor.view);
        EXPECT_NEAR(relative_error(tensor.as_seen, step, kDeadZone) / error, 1, 0.0021);
        const StepAndDeadZone found = find_dead_zone(error, tensor.view);
        EXPECT_NEAR(relative_error(tensor.as_seen, found.step, found.dead_zone) / error, 1, 0.0021);
      }
    }
  }
}

TEST(QuantSearch, EverySimdTargetFindsTheSame) {
  const Tensor tensor(heavy_values(70'001), DType::kFloat32);
  for (const Rounding rounding : {Rounding::kNearest, Rounding::kDeadZone, Rounding::kStochastic, Rounding::kDither}) {
    const float expected = find_step(rounding, 0.3, tensor.view);
    const StepAndDeadZone zone = find_dead_zone(0.3, tensor.view);
    EXPECT_GT(expected, 0);
    for (const std::int64_t target : simd_targets()) {
      const ForcedSimdTarget forced(target);
      EXPECT_EQ(find_step(rounding, 0.3, tensor.view), expected) << simd_target_name(target);
      const StepAndDeadZone own = find_dead_zone(0.3, tensor.view);
      EXPECT_EQ(own.step, zone.step) << simd_target_name(target);
      EXPECT_EQ(own.dead_zone.shift, zone.dead_zone.shift) << simd_target_name(target);
      EXPECT_EQ(own.dead_zone.outwards, zone.dead_zone.outwards) << simd_target_name(target);
    }
  }
}

void expect_steps(const std::vector<float>& values, const char* what, bool (*is_right)(float)) {
  const Tensor tensor(values, DType::kFloat32);
  for (const Rounding rounding : {Rounding::kNearest, Rounding::kDeadZone, Rounding::kStochastic, Rounding::kDither}) {
    EXPECT_TRUE(is_right(find_step(rounding, 0.3, tensor.view))) << what;
  }
  EXPECT_TRUE(is_right(find_dead_zone(0.3, tensor.view).step)) << what;
}

// The last value of 100,000 is in no sample.
TEST(QuantSearch, WhatIsNotFiniteIsFoundWhereverItIs) {
  const auto is_nan = [](float step) { return std::isnan(step); };
  for (const float bad : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
    for (const std::size_t at : {std::size_t{0}, std::size_t{99'999}}) {
      std::vector<float> values = heavy_values(100'000);
      values[at] = bad;
      expect_steps(values, "beside others", is_nan);
      values.assign(values.size(), 0.0f);
      values[at] = bad;
      expect_steps(values, "beside zeros", is_nan);
      values.assign(values.size(), bad);
      expect_steps(values, "all of them", is_nan);
    }
  }
}

TEST(QuantSearch, ZerosHaveNoStep) {
  expect_steps(std::vector<float>(70'000), "zeros", [](float step) { return step == 0; });
}

// A sample far below the rest, or without anything, tells nothing.
TEST(QuantSearch, OneLargeValueBesideNextToNothing) {
  for (const float others : {0.0f, 1e-30f, std::numeric_limits<float>::denorm_min()}) {
    std::vector<float> values(100'000, others);
    values.back() = 3;
    const Tensor tensor(values, DType::kFloat32);
    for (const Rounding rounding : {Rounding::kNearest, Rounding::kDeadZone}) {
      const float step = find_step(rounding, 0.3, tensor.view);
      const DeadZone dead_zone = rounding == Rounding::kNearest ? DeadZone{.shift = 0, .outwards = 0} : kDeadZone;
      EXPECT_LE(relative_error(values, step, dead_zone), 0.301) << others;
    }
    const StepAndDeadZone found = find_dead_zone(0.3, tensor.view);
    EXPECT_LE(relative_error(values, found.step, found.dead_zone), 0.301) << others;
  }
}

}  // namespace
}  // namespace cortado::quant_search_test
