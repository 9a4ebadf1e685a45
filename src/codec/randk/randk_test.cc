// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/randk/randk.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "codec/randk/randk_pattern.h"
#include "codec/stage.h"
#include "core/format.h"
#include "core/sanitized.h"

namespace cortado::randk_test {
namespace {

using Bytes = std::vector<std::byte>;
using Floats = std::vector<float>;

ConstTensorView view_of(const Floats& values) {
  return {values.data(), DType::kFloat32, 1, static_cast<std::int64_t>(values.size())};
}

Bytes encode(const Codec& codec, const Floats& values, const EncodeContext& context) {
  const ConstTensorView view = view_of(values);
  Bytes payload(codec.max_payload_bytes(1, view.cols, DType::kFloat32));
  EXPECT_EQ(codec.encode(view, context, payload, {}).value(), payload.size());
  return payload;
}

Floats decode(const Codec& codec, const Bytes& payload, std::size_t elems) {
  Floats output(elems, -1.0f);
  const auto cols = static_cast<std::int64_t>(elems);
  EXPECT_TRUE(codec.decode(payload, {output.data(), DType::kFloat32, 1, cols}, {}).ok());
  return output;
}

Floats normal(std::int64_t elems) {
  Floats values(static_cast<std::size_t>(elems));
  philox_fill_normal(5, 0, 0, values.data(), elems);
  return values;
}

TEST(Randk, TheWorkedExampleOfItsSpec) {
  const Floats values = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  const std::unique_ptr<Codec> codec = make_codec("randk(density=0.3)").value();
  const Bytes payload = encode(*codec, values, {.seed = 1, .step = 2, .tensor = 3});
  std::string got;
  for (const std::byte b : payload) {
    char text[4];
    std::snprintf(text, sizeof(text), "%02x ", std::to_integer<unsigned>(b));
    got += text;
  }
  EXPECT_EQ(got,
            "a1 cf f3 c1 64 ef 5a 09 02 00 00 00 00 00 00 00 "
            "00 00 c0 40 00 00 10 41 00 00 40 40 ");
  EXPECT_EQ(decode(*codec, payload, values.size()), (Floats{0, 0, 3, 0, 0, 6, 0, 0, 9, 0}));
}

struct Case {
  std::int64_t elems;
  double density;
  std::int64_t block;
};
constexpr Case kCases[] = {{1, 0.01, 1},   {10, 0.3, 1},       {10, 1.0, 1},    {1000, 0.01, 1},
                           {1000, 0.7, 1}, {1001, 0.999, 1},   {1000, 0.1, 30}, {1000, 0.99, 30},
                           {7, 0.01, 30},  {100003, 0.013, 1}, {5000, 0.5, 7},  {64, 0.5, 32}};

// Values in wire order give the order of the pieces; counts, that no element is kept twice.
TEST(Randk, KeepsExactlyTheStatedNumberOfDistinctElements) {
  for (const Case& c : kCases) {
    for (std::uint64_t step = 0; step < 20; ++step) {
      SCOPED_TRACE(std::to_string(c.elems) + " at " + number_text(c.density) + " step " + std::to_string(step));
      const RandkPattern pattern = RandkPattern::of(c.density, c.block, c.elems);
      EXPECT_GE(pattern.kept(), kept_elems(c.density, c.elems));
      EXPECT_LT(pattern.kept() - kept_elems(c.density, c.elems), c.block);
      std::vector<int> kept(static_cast<std::size_t>(c.elems)), seen(kept.size());
      pattern.walk(
          {.key = {1, 2}, .step = step},
          [&](std::int64_t position, std::int64_t count) {
            for (std::int64_t i = 0; i < count; ++i) ++seen[static_cast<std::size_t>(position + i)];
          },
          [&](std::int64_t position, std::int64_t count) {
            for (std::int64_t i = 0; i < count; ++i) {
              ++kept[static_cast<std::size_t>(position + i)];
              EXPECT_EQ(seen[static_cast<std::size_t>(position + i)], 1);
            }
          });
      std::int64_t sum = 0;
      for (const int times : kept) {
        ASSERT_LE(times, 1);
        sum += times;
      }
      EXPECT_EQ(sum, pattern.kept());
      EXPECT_EQ(seen, std::vector<int>(seen.size(), 1));
    }
  }
}

// Also where strata differ in size and where runs reach over the end: 4 standard deviations of a binomial.
TEST(Randk, EveryElementIsKeptEquallyOften) {
  constexpr int kSteps = 20000;
  for (const Case& c : {Case{10, 0.7, 1}, Case{11, 0.15, 1}, Case{20, 0.3, 3}}) {
    const RandkPattern pattern = RandkPattern::of(c.density, c.block, c.elems);
    std::vector<int> kept(static_cast<std::size_t>(c.elems));
    for (std::uint64_t step = 0; step < kSteps; ++step) {
      pattern.walk(
          {.key = {3, 4}, .step = step}, [](std::int64_t, std::int64_t) {},
          [&](std::int64_t position, std::int64_t count) {
            for (std::int64_t i = 0; i < count; ++i) ++kept[static_cast<std::size_t>(position + i)];
          });
    }
    const double p = static_cast<double>(pattern.kept()) / static_cast<double>(c.elems);
    for (const int times : kept) EXPECT_NEAR(times, kSteps * p, 4 * std::sqrt(kSteps * p * (1 - p))) << c.elems;
  }
}

TEST(Randk, ManyElementsNeedNoMemory) {
  const RandkPattern pattern = RandkPattern::of(1e-6, 3, std::int64_t{1} << 40);
  EXPECT_EQ(pattern.kept(), 1099512);
  std::int64_t sum = 0, previous = -1, descents = 0;
  pattern.walk(
      {.key = {5, 6}, .step = 7}, [](std::int64_t, std::int64_t) {},
      [&](std::int64_t position, std::int64_t count) {
        descents += position <= previous;
        previous = position + count - 1;
        EXPECT_LT(previous, std::int64_t{1} << 40);
        sum += count;
      });
  EXPECT_EQ(sum, pattern.kept());
  EXPECT_LE(descents, 1);
}

TEST(Randk, PositionsFollowFromTheContextAlone) {
  const std::unique_ptr<Codec> codec = make_codec("randk(density=0.1)").value();
  const Floats ones(1000, 1.0f);
  const auto pattern_of = [&](const EncodeContext& context) {
    return decode(*codec, encode(*codec, ones, context), ones.size());
  };
  const Floats pattern = pattern_of({.seed = 1, .step = 2, .tensor = 3});
  EXPECT_EQ(pattern_of({.seed = 1, .step = 2, .tensor = 3}), pattern);
  EXPECT_NE(pattern_of({.seed = 2, .step = 2, .tensor = 3}), pattern);
  EXPECT_NE(pattern_of({.seed = 1, .step = 3, .tensor = 3}), pattern);
  EXPECT_NE(pattern_of({.seed = 1, .step = 2, .tensor = 4}), pattern);
}

TEST(Randk, SumsOfValuesDecodeToTheSumOfTheTensors) {
  const std::unique_ptr<Codec> codec = make_codec("randk(density=0.1, block=8)").value();
  const EncodeContext context{.seed = 1, .step = 2, .tensor = 3};
  const Floats a = normal(5000), b(5000, 0.25f);
  Floats both(a.size());
  for (std::size_t i = 0; i < a.size(); ++i) both[i] = a[i] + b[i];
  Bytes sum = encode(*codec, a, context);
  const Bytes other = encode(*codec, b, context);
  ASSERT_EQ(std::memcmp(sum.data(), other.data(), 16), 0);
  for (std::size_t at = 16; at < sum.size(); at += 4) {
    float x, y;
    std::memcpy(&x, sum.data() + at, 4);
    std::memcpy(&y, other.data() + at, 4);
    x += y;
    std::memcpy(sum.data() + at, &x, 4);
  }
  EXPECT_EQ(decode(*codec, sum, a.size()), decode(*codec, encode(*codec, both, context), a.size()));
}

// With scale=none the squared error is (1 - k / n) of the squares, in the mean over steps.
TEST(Randk, ContractsByTheDensityInTheMean) {
  const Floats values = normal(2000);
  double squares = 0, lost = 0;
  for (const float x : values) squares += static_cast<double>(x) * x;
  constexpr int kSteps = kSanitized ? 500 : 2000;
  for (const char* spec : {"randk(density=0.1)", "randk(density=0.1, block=20)"}) {
    const std::unique_ptr<Codec> codec = make_codec(spec).value();
    lost = 0;
    for (std::uint64_t step = 0; step < kSteps; ++step) {
      const Floats output = decode(*codec, encode(*codec, values, {.seed = 1, .step = step, .tensor = 0}), 2000);
      for (std::size_t i = 0; i < values.size(); ++i) lost += std::pow(static_cast<double>(values[i]) - output[i], 2);
    }
    EXPECT_NEAR(lost / kSteps / squares, 0.9, 0.002) << spec;
  }
}

// The mean over steps of every element, and of all together, is the input: 5 standard deviations.
TEST(Randk, UnbiasedIsUnbiased) {
  const Floats values = normal(30);
  constexpr int kSteps = kSanitized ? 2000 : 40000;
  for (const char* spec : {"randk(density=0.4, scale=unbiased)", "randk(density=0.4, block=4, scale=unbiased)"}) {
    const std::unique_ptr<Codec> codec = make_codec(spec).value();
    std::vector<double> sums(values.size());
    for (std::uint64_t step = 0; step < kSteps; ++step) {
      const Floats output = decode(*codec, encode(*codec, values, {.seed = 9, .step = step, .tensor = 0}), 30);
      for (std::size_t i = 0; i < output.size(); ++i) sums[i] += output[i];
    }
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double deviation = std::abs(values[i]) * std::sqrt((30.0 / 12 - 1) / kSteps);
      EXPECT_NEAR(sums[i] / kSteps, values[i], 5 * deviation) << spec;
    }
  }
}

TEST(Randk, WhatIsNotFiniteAnywhereMakesTheFirstValueNaN) {
  for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN()}) {
    Floats values = normal(10000);
    values[4321] = bad;
    const std::unique_ptr<Codec> codec = make_codec("randk(density=1e-6)").value();
    const Bytes payload = encode(*codec, values, {});
    float first;
    std::memcpy(&first, payload.data() + 16, 4);
    EXPECT_TRUE(std::isnan(first));
  }
}

TEST(Randk, AsAStageItGivesTheValuesOfItsPayload) {
  const Floats values = normal(10000);
  const std::unique_ptr<Codec> codec = make_codec("randk(density=0.05, scale=unbiased)").value();
  const Sparsifier& stage = *codec->sparsifier();
  EXPECT_TRUE(stage.is_shared());
  const EncodeContext context{.seed = 1, .step = 2, .tensor = 3};
  const Bytes payload = encode(*codec, values, context);
  Floats kept(static_cast<std::size_t>(stage.max_kept(1, 10000)));
  Bytes index(stage.max_index_bytes(1, 10000));
  const Selection selection = stage.select(view_of(values), context, kept, index, {}).value();
  EXPECT_EQ(selection.kept, 500);
  EXPECT_EQ(selection.index_bytes, 16u);
  EXPECT_EQ(std::memcmp(payload.data(), index.data(), 16), 0);
  EXPECT_EQ(std::memcmp(payload.data() + 16, kept.data(), kept.size() * sizeof(float)), 0);
  EXPECT_EQ(stage.check_index(index, 1, 10000).value(), 500);
  Floats output(values.size(), -1.0f);
  EXPECT_TRUE(stage.scatter(index, kept, {output.data(), DType::kFloat32, 1, 10000}, {}).ok());
  EXPECT_EQ(output, decode(*codec, payload, values.size()));
  EXPECT_EQ(stage.check_index(std::span(index).first(15), 1, 10000).status().message(),
            "randk(density=0.05, block=1, scale=unbiased): index of 1 x 10000: 15 bytes, expected 16");
}

}  // namespace
}  // namespace cortado::randk_test
