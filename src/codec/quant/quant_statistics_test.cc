// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What `quant` promises of means and rates. All seeds are fixed.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numbers>
#include <string>
#include <vector>

#include "codec/quant/quant.h"
#include "codec/stage.h"
#include "core/philox.h"

namespace cortado {
namespace {

std::vector<float> through(const Codec& codec, const std::vector<float>& values, const EncodeContext& context) {
  const auto elems = static_cast<std::int64_t>(values.size());
  std::vector<std::byte> payload(codec.max_payload_bytes(1, elems, DType::kFloat32));
  std::vector<float> output(values.size());
  EXPECT_TRUE(codec.encode({values.data(), DType::kFloat32, 1, elems}, context, payload, {}).ok());
  EXPECT_TRUE(codec.decode(payload, {output.data(), DType::kFloat32, 1, elems}, {}).ok());
  return output;
}

// The mean over many steps of every value between two levels is the value, to a 512th of a step: bytes tell no more
// apart. And the mean over all values is, to what chance allows.
TEST(QuantStatistics, StochasticAndDitherAreUnbiased) {
  constexpr int kSteps = 10000, kValues = 512;
  std::vector<float> values;  // largest 7, step 1
  for (int i = 0; i < kValues; ++i) values.push_back(-7 + 14 * static_cast<float>(i) / (kValues - 1));
  for (const char* spec : {"quant(4, block=tensor, round=stochastic)", "quant(4, block=tensor, round=dither)"}) {
    const std::unique_ptr<Codec> codec = make_codec(spec).value();
    std::vector<double> sums(kValues), squares(kValues);
    for (std::uint64_t step = 0; step < kSteps; ++step) {
      const std::vector<float> output = through(*codec, values, {.seed = 1, .step = step, .tensor = 2});
      for (std::size_t i = 0; i < kValues; ++i) {
        const double error = static_cast<double>(output[i]) - values[i];
        sums[i] += error;
        squares[i] += error * error;
      }
    }
    double total = 0;
    for (std::size_t i = 0; i < kValues; ++i) {
      const double deviation = std::sqrt(squares[i] / kSteps / kSteps);
      EXPECT_LE(std::fabs(sums[i] / kSteps), 1.0 / 512 + 4.5 * deviation + 1e-5) << spec << ", value " << values[i];
      total += sums[i];
      // The fraction of a stochastic value says its variance; dither's is that of a uniform error.
      const double f = values[i] - std::floor(values[i]);
      const double expected = spec == std::string("quant(4, block=tensor, round=dither)") ? 1.0 / 12 : f * (1 - f);
      EXPECT_NEAR(squares[i] / kSteps, expected, 0.012) << spec << ", value " << values[i];
    }
    EXPECT_LE(std::fabs(total / kSteps / kValues), 4.5 * 0.41 / std::sqrt(1.0 * kSteps * kValues) + 1e-5) << spec;
  }
}

// Steps, tensors and seeds draw different numbers; equal ones the same.
TEST(QuantStatistics, WhatIsDrawnDependsOnTheContext) {
  const std::unique_ptr<Codec> codec = make_codec("quant(3, round=stochastic)").value();
  std::vector<float> values(4096);
  philox_fill_normal(1, 0, 0, values.data(), 4096);
  const EncodeContext context{.seed = 1, .step = 2, .tensor = 3};
  const std::vector<float> output = through(*codec, values, context);
  EXPECT_EQ(through(*codec, values, context), output);
  EXPECT_NE(through(*codec, values, {.seed = 2, .step = 2, .tensor = 3}), output);
  EXPECT_NE(through(*codec, values, {.seed = 1, .step = 3, .tensor = 3}), output);
  EXPECT_NE(through(*codec, values, {.seed = 1, .step = 2, .tensor = 4}), output);
}

std::vector<std::uint8_t> codes_of(const Codec& codec, const std::vector<float>& values, std::vector<std::byte>* side) {
  const auto elems = static_cast<std::int64_t>(values.size());
  side->resize(codec.quantiser()->max_side_bytes(1, elems));
  std::vector<std::uint8_t> codes(values.size());
  const ConstTensorView input(values.data(), DType::kFloat32, 1, elems);
  EXPECT_TRUE(codec.quantiser()->quantise(input, {.seed = 4}, codes, *side, {}).ok());
  return codes;
}

double entropy_bits(const std::vector<std::uint8_t>& codes) {
  std::array<double, 256> counts = {};
  for (const std::uint8_t code : codes) ++counts[code];
  double bits = 0;
  for (const double count : counts) {
    const double p = count / static_cast<double>(codes.size());
    if (p > 0) bits -= p * std::log2(p);
  }
  return bits;
}

// Box-Muller: the table below is of the normal distribution itself.
std::vector<float> gaussian_values(std::int64_t elems) {
  std::vector<float> values;
  for (std::uint64_t block = 0; static_cast<std::int64_t>(values.size()) < elems; ++block) {
    const PhiloxBlock words = philox_block(6, 0, 0, block);
    const double radius = std::sqrt(-2 * std::log((words[0] + 0.5) / 0x1p32));
    const double angle = 2 * std::numbers::pi * words[1] / 0x1p32;
    values.push_back(static_cast<float>(radius * std::cos(angle)));
    values.push_back(static_cast<float>(radius * std::sin(angle)));
  }
  return values;
}

struct Rate {
  double error, step, bits;
};
struct Column {
  const char* round;
  bool filters;  // what is below one step
  Rate rates[6];
};
// Uniform scalar quantisation of N(0, 1), by numerical integration.
constexpr Column kTable[] = {
    {"nearest",
     false,
     {{0.50, 1.7335, 1.412},
      {0.35, 1.2124, 1.853},
      {0.20, 0.6928, 2.605},
      {0.10, 0.3464, 3.584},
      {0.05, 0.1732, 4.578},
      {0.02, 0.0693, 5.899}}},
    {"dead_zone",
     false,
     {{0.50, 1.5439, 1.284},
      {0.35, 1.0881, 1.795},
      {0.20, 0.6323, 2.611},
      {0.10, 0.3212, 3.629},
      {0.05, 0.1621, 4.642},
      {0.02, 0.0652, 5.973}}},
    {"stochastic",
     false,
     {{0.50, 1.2247, 1.916},
      {0.35, 0.8573, 2.353},
      {0.20, 0.4899, 3.105},
      {0.10, 0.2449, 4.084},
      {0.05, 0.1225, 5.078},
      {0.02, 0.0490, 6.399}}},
    {"stochastic",
     true,
     {{0.50, 0.9996, 1.615},
      {0.35, 0.7118, 2.246},
      {0.20, 0.4274, 3.108},
      {0.10, 0.2259, 4.107},
      {0.05, 0.1172, 5.095},
      {0.02, 0.0481, 6.407}}},
    {"dither",
     false,
     {{0.50, 1.7321, 1.547},
      {0.35, 1.2124, 1.927},
      {0.20, 0.6928, 2.632},
      {0.10, 0.3464, 3.591},
      {0.05, 0.1732, 4.580},
      {0.02, 0.0693, 5.899}}},
};
constexpr double kBitsTolerance = 0.02, kErrorTolerance = 0.01;

class GaussianRates : public testing::TestWithParam<Column> {
 protected:
  static void SetUpTestSuite() { values_ = gaussian_values(std::int64_t{1} << 20); }

  // {relative L2 error, entropy in bits, step}
  static Rate measured(const std::string& spec) {
    const std::unique_ptr<Codec> codec = make_codec(spec).value();
    const auto elems = static_cast<std::int64_t>(values_.size());
    std::vector<std::byte> side;
    const std::vector<std::uint8_t> codes = codes_of(*codec, values_, &side);
    std::vector<float> output(values_.size());
    EXPECT_TRUE(codec->quantiser()->dequantise(codes, side, {output.data(), DType::kFloat32, 1, elems}, {}).ok());
    double difference = 0, reference = 0;
    for (std::size_t i = 0; i < output.size(); ++i) {
      difference += std::pow(static_cast<double>(output[i]) - values_[i], 2);
      reference += std::pow(static_cast<double>(values_[i]), 2);
    }
    float step;  // the last of the side section, of the only block
    std::memcpy(&step, side.data() + side.size() - sizeof(step), sizeof(step));
    return {std::sqrt(difference / reference), step, entropy_bits(codes)};
  }

  static std::vector<float> values_;
};
std::vector<float> GaussianRates::values_;

TEST_P(GaussianRates, AtTheStepsOfTheTable) {
  for (const Rate& expected : GetParam().rates) {
    // bound is the step for stochastic rounding, and half of it and 0.65 of it for the others.
    const std::string round = GetParam().round;
    const double steps = round == "stochastic" ? 1 : round == "dead_zone" ? 0.65 : 0.5;
    char spec[160], filter[40] = "off";
    if (GetParam().filters) std::snprintf(filter, sizeof(filter), "%.9g", expected.step);
    std::snprintf(spec, sizeof(spec), "quant(bound=%.9g, scale=rms, block=tensor, round=%s, filter=%s)",
                  expected.step * steps / (1 - 0x1p-13), round.c_str(), filter);
    const Rate rate = measured(spec);
    EXPECT_NEAR(rate.step, expected.step, 0.002 * expected.step) << spec;
    EXPECT_NEAR(rate.bits, expected.bits, kBitsTolerance) << spec;
    EXPECT_NEAR(rate.error, expected.error, kErrorTolerance * expected.error) << spec;
  }
}

TEST_P(GaussianRates, AtTheErrorsOfTheTable) {
  if (GetParam().filters) GTEST_SKIP() << "filter and error do not go together";
  for (const Rate& expected : GetParam().rates) {
    char spec[100];
    std::snprintf(spec, sizeof(spec), "quant(error=%g, block=tensor, round=%s)", expected.error, GetParam().round);
    const Rate rate = measured(spec);
    EXPECT_NEAR(rate.error, expected.error, kErrorTolerance * expected.error) << spec;
    EXPECT_NEAR(rate.bits, expected.bits, kBitsTolerance) << spec;
    EXPECT_NEAR(rate.step, expected.step, kErrorTolerance * expected.step) << spec;
  }
}

INSTANTIATE_TEST_SUITE_P(QuantStatistics, GaussianRates, testing::ValuesIn(kTable), [](const auto& info) {
  return std::string(info.param.filters ? "filter_" : "") + info.param.round;
});

// Dither's codes are those of stochastic rounding, number for number.
TEST(QuantStatistics, DitherHasTheCodesOfStochasticRounding) {
  const std::vector<float> values = gaussian_values(10000);
  std::vector<std::byte> side;
  EXPECT_EQ(codes_of(*make_codec("quant(5, round=dither)").value(), values, &side),
            codes_of(*make_codec("quant(5, round=stochastic)").value(), values, &side));
}

// Error feedback converges with codecs that bring every tensor nearer to 0.
TEST(QuantStatistics, BiasedSettingsContract) {
  for (const char* spec :
       {"quant(2)", "quant(3)", "quant(4)", "quant(8)", "quant(2, round=dead_zone)", "quant(4, round=dead_zone)",
        "quant(4, filter=0.2)", "quant(2, scale=rms)", "quant(4, scale=rms)", "quant(4, block=tensor)",
        "quant(error=0.5)", "quant(bound=0.3, scale=rms)", "fp8(e4m3)", "fp8(e5m2)"}) {
    const std::unique_ptr<Codec> codec = make_codec(spec).value();
    for (const double power : {0.0, 0.3, 1.0, 3.0, 9.0}) {  // from one magnitude to very heavy tails
      std::vector<float> values = gaussian_values(4096);
      for (float& v : values) v = std::copysign(static_cast<float>(std::pow(std::fabs(v), power)), v);
      const std::vector<float> output = through(*codec, values, {});
      double difference = 0, reference = 0;
      for (std::size_t i = 0; i < values.size(); ++i) {
        const double error = static_cast<double>(output[i]) - values[i];
        difference += error * error;
        reference += static_cast<double>(values[i]) * values[i];
        EXPECT_LE(std::fabs(error), std::fabs(values[i]) * 1.0001) << spec << ", " << values[i];
      }
      EXPECT_LT(difference, 0.95 * reference) << spec << ", power " << power;
    }
  }
}

}  // namespace
}  // namespace cortado
