// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/compso/compso.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <random>

#include "codec/compso/compso_groups.h"
#include "codec/compso/compso_reference.h"
#include "codec/rans/rans_stream.h"
#include "core/float16.h"
#include "core/sanitized.h"
#include "core/simd_target.h"

namespace cortado {
namespace {

using Bytes = std::vector<std::byte>;

constexpr EncodeContext kContext = {.seed = 3, .step = 5, .tensor = 7};
constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

Bytes encode(const std::string& spec, const std::vector<float>& values, const EncodeContext& context = kContext) {
  const std::unique_ptr<Codec> codec = make_codec(spec).value();
  const auto cols = static_cast<std::int64_t>(values.size());
  Bytes payload(codec->max_payload_bytes(1, cols, DType::kFloat32));
  Bytes scratch(codec->scratch_bytes(1, cols, DType::kFloat32));
  payload.resize(codec->encode({values.data(), DType::kFloat32, 1, cols}, context, payload, scratch).value());
  return payload;
}

Status decode(const std::string& spec, const Bytes& payload, std::vector<float>* values) {
  const std::unique_ptr<Codec> codec = make_codec(spec).value();
  const auto cols = static_cast<std::int64_t>(values->size());
  Bytes scratch(codec->scratch_bytes(1, cols, DType::kFloat32));
  return codec->decode(payload, {values->data(), DType::kFloat32, 1, cols}, scratch);
}

std::vector<float> round_trip(const std::string& spec, const std::vector<float>& values,
                              const EncodeContext& context = kContext) {
  std::vector<float> decoded(values.size());
  const Status status = decode(spec, encode(spec, values, context), &decoded);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return decoded;
}

std::vector<float> normals(std::size_t elems, float scale = 1, std::uint32_t seed = 1) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> values(elems);
  for (float& value : values) value = normal(generator);
  return values;
}

double relative_error(const std::vector<float>& values, const std::vector<float>& decoded) {
  double lost = 0, all = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    lost += std::pow(static_cast<double>(values[i]) - decoded[i], 2);
    all += std::pow(static_cast<double>(values[i]), 2);
  }
  return std::sqrt(lost / all);
}

TEST(Compso, IsSpeltInOneWay) {
  const std::string standard =
      "compso(bound=0.004, filter=bound, round=stochastic, coder=rans, block=layer, chunk_codes=65536)";
  for (const char* spelt :
       {"compso", "compso(bound=4e-3)", "compso(bound=0.0040)", "compso(0.004, chunk_codes=065536)"}) {
    EXPECT_EQ(canonical_codec(spelt), standard) << spelt;
  }
  EXPECT_EQ(canonical_codec("compso(filter=0.0, block=2048)"), canonical_codec("compso(filter=0, block=02048)"));
  EXPECT_EQ(canonical_codec("compso(error=0.10)"),
            "compso(error=0.1, round=stochastic, coder=rans, block=layer, chunk_codes=65536)");
}

TEST(Compso, TheWorkedExampleOfItsSpec) {
  const std::vector<float> values = {1, -0.5f, 0.2f, 0.75f, -1};
  const Bytes payload = encode("compso(bound=0.25, round=nearest, coder=none)", values);
  const unsigned char expected[] = {1,    0,    0,    0,    0,  0, 0, 0,  // bytes a code
                                    0,    0,    0,    0x3f,               // step 0.5
                                    0xfe, 0xff, 0xff, 0xff,               // smallest level -2
                                    130,  128,  128,  130,  126};
  ASSERT_EQ(payload.size(), sizeof(expected));
  EXPECT_EQ(std::memcmp(payload.data(), expected, sizeof(expected)), 0);
  EXPECT_EQ(round_trip("compso(bound=0.25, round=nearest, coder=none)", values), (std::vector<float>{1, 0, 0, 1, -1}));
}

// ---- against the reference -----------------------------------------------------------------------------------------

struct Case {
  const char* name;
  std::vector<float> values;
};

std::vector<Case> cases() {
  std::vector<float> far = normals(500, 0.01f), wide = normals(3000), one_large = normals(2100);
  for (float& x : far) x += 5;
  one_large[7] = 1e6f;
  std::vector<float> huge = {3e38f, -3e38f, 1, 0}, tiny = {1e-40f, -3e-39f, 2e-36f, 0};
  std::vector<float> special = normals(40), farthest(3000, 1.0f);
  special[11] = kNan;
  for (std::size_t i = 0; i < farthest.size(); i += 2) farthest[i] = 1 - 0x1p-21f;
  return {{"normal", wide},      {"one large", one_large}, {"far from 0", far},    {"one value", {-3}},
          {"zeros", {0, -0.0f}}, {"equal", {7, 7, 7}},     {"negative", {-9, -8}}, {"huge", huge},
          {"tiny", tiny},        {"NaN", special},         {"Inf", {1, kInf, 2}},  {"farthest", farthest}};
}

void expect_as_reference(const CompsoSettings& settings, const std::string& spec, const Case& test) {
  SCOPED_TRACE(spec + ": " + test.name);
  const Bytes payload = encode(spec, test.values);
  const auto elems = static_cast<std::int64_t>(test.values.size());
  const std::int64_t block_elems = settings.block_elems == 0 ? elems : settings.block_elems;
  const std::size_t blocks = static_cast<std::size_t>((elems + block_elems - 1) / block_elems);
  std::vector<float> decoded;
  ASSERT_TRUE(decode(spec, payload, &(decoded = std::vector<float>(test.values.size()))).ok());
  const std::size_t steps_at = settings.rounding == Rounding::kDither ? 24 : 8;
  const std::size_t codes_at = steps_at + 8 * blocks;
  const bool is_wide = payload[0] == std::byte{2};
  ASSERT_EQ(payload.size(), codes_at + test.values.size() * (is_wide ? 2 : 1));
  bool needs_wide = false;
  for (std::size_t b = 0; b < blocks; ++b) {
    const std::size_t first = b * static_cast<std::size_t>(block_elems);
    const std::size_t end = std::min(test.values.size(), first + static_cast<std::size_t>(block_elems));
    const std::vector<float> values(test.values.begin() + static_cast<std::ptrdiff_t>(first),
                                    test.values.begin() + static_cast<std::ptrdiff_t>(end));
    const CompsoReferenceBlock expected = compso_reference(settings, values, kContext, static_cast<std::int64_t>(first),
                                                           std::numeric_limits<float>::max());
    needs_wide |= expected.last_level - expected.first_level > 255;
    float step;
    std::memcpy(&step, payload.data() + steps_at + 4 * b, 4);
    EXPECT_EQ(std::bit_cast<std::uint32_t>(step), std::bit_cast<std::uint32_t>(expected.step));
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::int32_t code = expected.levels[i] + (is_wide ? 32896 : 128);
      const std::byte* at = payload.data() + codes_at + first + i;
      ASSERT_EQ(std::to_integer<std::int32_t>(*at), code & 255) << i << ": " << values[i];
      if (is_wide) {
        ASSERT_EQ(std::to_integer<std::int32_t>(at[test.values.size()]), code >> 8 & 255) << i;
      }
      ASSERT_EQ(std::bit_cast<std::uint32_t>(decoded[first + i] + 0.0f),
                std::bit_cast<std::uint32_t>(expected.decoded[i] + 0.0f))
          << i << ": " << values[i];
    }
  }
  EXPECT_EQ(is_wide, needs_wide);
}

TEST(Compso, GivesTheBytesOfTheReferenceOnEveryTarget) {
  constexpr const char* kRoundings[] = {"nearest", "dead_zone", "stochastic", "dither"};
  for (const std::int64_t target : simd_targets()) {
    const ForcedSimdTarget forced(target);
    for (const double bound : {0.3, 4e-3, 1e-4}) {
      for (const double filter : {0.0, bound, 0.5}) {
        for (const std::int64_t block : {0, 1024}) {
          for (int rounding = 0; rounding < 4; ++rounding) {
            if (rounding == 3 && filter > 0) continue;
            const CompsoSettings settings = {.bound = bound,
                                             .filter = filter,
                                             .rounding = static_cast<Rounding>(rounding),
                                             .is_coded = false,
                                             .block_elems = block};
            char spec[200];
            std::snprintf(spec, sizeof(spec), "compso(bound=%g, filter=%s, round=%s, block=%s, coder=none)", bound,
                          filter > 0 ? std::to_string(filter).c_str() : "off", kRoundings[rounding],
                          block == 0 ? "layer" : "1024");
            for (const Case& test : cases()) expect_as_reference(settings, spec, test);
          }
        }
      }
    }
  }
}

// ---- values --------------------------------------------------------------------------------------------------------

TEST(Compso, NoErrorIsLargerThanTheBound) {
  for (const char* round : {"nearest", "dead_zone", "stochastic", "dither"}) {
    for (const double bound : {0.2, 4e-3, 1e-4}) {
      const std::vector<float> values = normals(5000);
      const auto [low, high] = std::minmax_element(values.begin(), values.end());
      const double most = bound * (*high - *low) * (1 + 1e-6);
      const std::vector<float> decoded =
          round_trip("compso(bound=" + std::to_string(bound) + ", round=" + round + ")", values);
      for (std::size_t i = 0; i < values.size(); ++i) {
        ASSERT_LE(std::fabs(static_cast<double>(values[i]) - decoded[i]), most) << round << " " << values[i];
      }
    }
  }
}

TEST(Compso, WithoutAFilterItIsUnbiased) {
  const std::vector<float> values = {1, -0.37f, 0.0004f, 0.2f, -0.0001f};
  constexpr int kSteps = kSanitized ? 300 : 20000;  // the same paths
  std::array<double, 5> sums = {};
  for (int step = 0; step < kSteps; ++step) {
    const std::vector<float> decoded = round_trip("compso(bound=0.3, filter=off, coder=none)", values,
                                                  {.seed = 1, .step = static_cast<std::uint64_t>(step), .tensor = 2});
    for (std::size_t i = 0; i < values.size(); ++i) sums[i] += decoded[i];
  }
  const double step = 0.3 * 1.37;
  // 1/512 of a step is what a random byte may be off by; 4 standard deviations of the mean.
  for (std::size_t i = 0; i < values.size(); ++i) {
    EXPECT_NEAR(sums[i] / kSteps, values[i], step / 512 + 4 * 0.5 * step / std::sqrt(kSteps)) << i;
  }
}

TEST(Compso, ConstantAndLosslessLayersAreExact) {
  EXPECT_EQ(round_trip("compso", std::vector<float>(100, 0.1f)), std::vector<float>(100, 0.1f));
  EXPECT_EQ(round_trip("compso(bound=0)", {1, -0.3f, 1e-45f, kInf}), (std::vector<float>{1, -0.3f, 1e-45f, kInf}));
  const std::vector<float> values = normals(100);
  EXPECT_EQ(encode("compso(bound=0)", values), encode("float_rans", values));
}

// Found in review: a step as large as the values, and half of it as noise.
TEST(Compso, ConstantLayersAreNearlyExactWithDither) {
  for (const float value : {0.1f, -7.0f}) {
    for (const float found : round_trip("compso(round=dither)", std::vector<float>(100, value))) {
      EXPECT_NEAR(found, value, 1e-6 * std::fabs(value));
    }
  }
}

// Found in review: rounding made the error that was left negative, and a step of its square root.
TEST(Compso, TargetErrorsOfValuesOfOneMagnitudeAreKept) {
  std::vector<float> values(100000, 0.7f);
  for (std::size_t i = 0; i < values.size(); i += 3) values[i] = -0.7f;
  for (const double error : {0.7, 0.3, 0.1}) {
    const std::string spec = "compso(error=" + std::to_string(error) + ", round=dead_zone)";
    EXPECT_LE(relative_error(values, round_trip(spec, values)), error * 1.01) << spec;
  }
}

// Where float32 rounds the sum of level and random number, none may come out below the smallest level.
TEST(Compso, RandomRoundingKeepsItsBoundHoweverFarFromZero) {
  for (const char* rounding : {"stochastic", "dither"}) {
    // The smaller one is an odd number of steps, exactly.
    std::vector<float> farthest(4096, 1.0f);
    for (std::size_t i = 0; i < farthest.size(); i += 2) farthest[i] = 1 - 0x1p-21f;
    for (const float value : round_trip(std::string("compso(round=") + rounding + ")", farthest)) {
      ASSERT_NEAR(value, 1, 3 * 0x1p-21f) << rounding;
    }
    for (const float middle : {1.0f, 1.05f, -3.0f}) {
      for (const float width : {0x1p-20f, 1e-5f, 1e-3f}) {
        std::vector<float> values = normals(20000, width / 8);
        for (float& value : values) value = middle + std::clamp(value, -width, width);
        const auto [low, high] = std::minmax_element(values.begin(), values.end());
        const float step = std::max(4e-3f * (*high - *low), 3.1f * 0x1p-21f);
        const std::vector<float> decoded = round_trip(std::string("compso(round=") + rounding + ")", values);
        for (std::size_t i = 0; i < values.size(); ++i) {
          ASSERT_LE(std::fabs(decoded[i] - values[i]), 2 * step) << rounding << " " << middle << " " << width;
        }
      }
    }
  }
}

// The largest values of fp16: what is decoded must be finite, and as near as the target error asks for.
TEST(Compso, TheLargestHalvesStayFinite) {
  const auto round_trip_half = [](const std::string& spec, const std::vector<float>& values) {
    const std::unique_ptr<Codec> codec = make_codec(spec).value();
    const auto cols = static_cast<std::int64_t>(values.size());
    std::vector<std::uint16_t> half(values.size());
    std::transform(values.begin(), values.end(), half.begin(), float_to_fp16);
    Bytes payload(codec->max_payload_bytes(1, cols, DType::kFloat16));
    Bytes scratch(codec->scratch_bytes(1, cols, DType::kFloat16));
    payload.resize(codec->encode({half.data(), DType::kFloat16, 1, cols}, kContext, payload, scratch).value());
    EXPECT_TRUE(codec->decode(payload, {half.data(), DType::kFloat16, 1, cols}, scratch).ok());
    std::vector<float> decoded(values.size());
    std::transform(half.begin(), half.end(), decoded.begin(), fp16_to_float);
    return decoded;
  };
  std::vector<float> both(5000, 65504.0f), mixed = normals(5000, 3e4f);
  for (std::size_t i = 0; i < both.size(); i += 2) both[i] = -65504.0f;
  for (float& value : mixed) value = std::clamp(value, -65504.0f, 65504.0f);
  for (const char* rounding : {"nearest", "dead_zone", "stochastic", "dither"}) {
    for (const char* how : {"bound=0.004", "bound=0.9", "error=0.9", "error=0.1"}) {
      const std::string spec = std::string("compso(") + how + ", round=" + rounding + ")";
      for (const auto& values : {std::vector<float>{65504}, both, mixed}) {
        for (const float value : round_trip_half(spec, values)) ASSERT_TRUE(std::isfinite(value)) << spec;
      }
    }
  }
  for (const char* rounding : {"nearest", "dead_zone", "stochastic"}) {
    const std::string spec = std::string("compso(round=") + rounding + ")";
    for (const float one : {62000.0f, 63000.0f, 65504.0f}) {
      EXPECT_NEAR(round_trip_half(spec, {one})[0], one, 0.06f * one) << spec;
    }
  }
  for (const float magnitude : {7.0f, 32000.0f, 40000.0f, 65504.0f}) {
    std::vector<float> values(5000, magnitude);
    for (std::size_t i = 0; i < values.size(); i += 3) values[i] = -magnitude;
    const std::vector<float> decoded = round_trip_half("compso(error=0.1, round=dead_zone)", values);
    EXPECT_LE(relative_error(values, decoded), 0.101) << magnitude;
  }
}

TEST(Compso, NonFiniteLayersDecodeToNan) {
  for (const float bad : {kInf, -kInf, kNan}) {
    for (const float value : round_trip("compso", {1, bad, 2})) EXPECT_TRUE(std::isnan(value));
  }
  // Only the block that has it.
  std::vector<float> values = normals(2048);
  values[3] = kInf;
  const std::vector<float> decoded = round_trip("compso(block=1024)", values);
  EXPECT_TRUE(std::isnan(decoded[1023]) && std::isfinite(decoded[1024]));
}

// 0.5, 0.2, 0.1, 0.05 of papers' table for N(0,1), "filter + stochastic": step, bits a value.
TEST(Compso, HasTheRateOfTheTableAtItsErrors) {
  const std::vector<float> values = normals(1 << 20);
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
  struct Row {
    double error, step, bits;
  };
  for (const Row& row :
       {Row{0.5, 0.9996, 1.615}, Row{0.2, 0.4274, 3.108}, Row{0.1, 0.2259, 4.107}, Row{0.05, 0.1172, 5.095}}) {
    const std::string spec = "compso(bound=" + std::to_string(row.step / (*high - *low)) + ")";
    const Bytes payload = encode(spec, values);
    std::vector<float> decoded(values.size());
    ASSERT_TRUE(decode(spec, payload, &decoded).ok());
    EXPECT_NEAR(relative_error(values, decoded) / row.error, 1, 0.01) << spec;
    EXPECT_NEAR(8.0 * static_cast<double>(payload.size()) / (1 << 20), row.bits, 0.02 + 0.02) << spec;
  }
}

TEST(Compso, ReachesATargetError) {
  std::vector<float> heavy = normals(200000);
  for (std::size_t i = 0; i < heavy.size(); i += 97) heavy[i] *= 300;
  for (const char* round : {"nearest", "dead_zone", "stochastic", "dither"}) {
    for (const double error : {0.5, 0.1, 0.01}) {
      for (const std::vector<float>& values : {normals(30000), heavy}) {
        const std::string spec = "compso(error=" + std::to_string(error) + ", round=" + round + ")";
        EXPECT_NEAR(relative_error(values, round_trip(spec, values)) / error, 1, 0.03) << spec;
      }
    }
  }
}

// Where a sample sees none of them, steps were corrected beyond float32, and to NaN.
TEST(Compso, ReachesATargetErrorOfFewLargeValues) {
  std::mt19937 random(1);
  for (int i = 0; i < 20; ++i) {
    std::vector<float> values(i == 0 ? 131072 : 70000 + random() % 100000);
    if (i == 0) values[256] = 5e37f;
    for (int k = 0; i > 0 && k <= i % 4; ++k) {
      const double exponent = i % 5 == 4 ? -44 : 30 + random() % 800 * 0.01;
      values[random() % values.size()] = static_cast<float>(std::pow(10, exponent));
    }
    for (const char* round : {"nearest", "dead_zone", "stochastic", "dither"}) {
      const std::string spec = std::string("compso(error=0.2, round=") + round + ")";
      SCOPED_TRACE(spec + ", " + std::to_string(i));
      const std::vector<float> decoded = round_trip(spec, values);
      EXPECT_TRUE(std::all_of(decoded.begin(), decoded.end(), [](float v) { return std::isfinite(v); }));
      const bool is_random = round[0] == 's' || round == std::string("dither");
      if (!is_random && i % 5 != 4) {
        EXPECT_LE(relative_error(values, decoded), 0.2 * 1.01);
      }
    }
  }
}

TEST(Compso, ChoosesTheDeadZoneForATargetError) {
  std::vector<float> heavy = normals(100000);
  for (float& x : heavy) x *= x * x;
  for (const double error : {0.5, 0.2, 0.1}) {
    const auto bytes = [&](const std::string& codec, const std::string& coder) {
      const std::string spec = codec + "(error=" + std::to_string(error) + ", round=dead_zone)" + coder;
      return static_cast<double>(encode(spec, heavy).size());
    };
    EXPECT_LT(bytes("compso", ""), 0.995 * bytes("quant", " | rans")) << error;
  }
  // And what stands for its levels: their mean.
  const std::string spec = "compso(error=0.2, round=dead_zone, coder=none)";
  const Bytes payload = encode(spec, heavy);
  float step, outwards;
  std::memcpy(&step, payload.data() + 8, sizeof(step));
  std::memcpy(&outwards, payload.data() + 16, sizeof(outwards));
  const std::vector<float> decoded = round_trip(spec, heavy);
  double offsets = 0, kept = 0;
  for (std::size_t i = 0; i < heavy.size(); ++i) {
    if (decoded[i] == 0) continue;
    offsets += static_cast<double>(std::fabs(heavy[i]) - std::fabs(decoded[i])) / step;
    kept += 1;
  }
  EXPECT_NEAR(offsets / kept, 0, 1e-4);
  EXPECT_GT(outwards, 0.1f);
}

// ---- layers --------------------------------------------------------------------------------------------------------

class CompsoLayers : public testing::Test {
 protected:
  CompsoLayers() {
    for (const std::size_t elems : {1000, 0, 37, 4097}) {
      values_.push_back(
          normals(elems, std::pow(10.0f, static_cast<float>(values_.size())), 1 + static_cast<std::uint32_t>(elems)));
    }
    for (const std::vector<float>& layer : values_) {
      elems_.push_back(static_cast<std::int64_t>(layer.size()));
      views_.emplace_back(layer.data(), DType::kFloat32, 1, elems_.back());
      decoded_.emplace_back(layer.size());
    }
    for (std::vector<float>& layer : decoded_) {
      outputs_.push_back({layer.data(), DType::kFloat32, 1, static_cast<std::int64_t>(layer.size())});
    }
  }

  Bytes encode_all(const CompsoSettings& settings) {
    Bytes payload(max_compso_bytes(settings, elems_, DType::kFloat32));
    scratch_.resize(compso_scratch_bytes(settings, elems_));
    payload.resize(encode_layers(settings, views_, kContext, payload.data(), scratch_.data()));
    return payload;
  }
  Status decode_all(const CompsoSettings& settings, const Bytes& payload) {
    return decode_layers(settings, payload, outputs_, scratch_.data());
  }

  std::vector<std::vector<float>> values_, decoded_;
  std::vector<std::int64_t> elems_;
  std::vector<ConstTensorView> views_;
  std::vector<TensorView> outputs_;
  Bytes scratch_;
};

TEST_F(CompsoLayers, HaveStepsOfTheirOwnInOneMessage) {
  for (const double bound : {4e-3, 1e-3}) {  // codes of one byte and of two
    const CompsoSettings settings = {.bound = bound, .filter = bound};
    ASSERT_TRUE(decode_all(settings, encode_all(settings)).ok());
    std::int64_t first_random = 0;
    for (std::size_t i = 0; i < values_.size(); ++i) {
      if (values_[i].empty()) continue;
      EXPECT_EQ(
          decoded_[i],
          compso_reference(settings, values_[i], kContext, first_random, std::numeric_limits<float>::max()).decoded);
      first_random += (elems_[i] + 255) / 256 * 256;
    }
  }
}

TEST_F(CompsoLayers, OfAnyKindComeBack) {
  for (const CompsoSettings& settings :
       {CompsoSettings{.bound = 0}, CompsoSettings{.error = 0.1}, CompsoSettings{.is_coded = false},
        CompsoSettings{.rounding = Rounding::kDeadZone, .error = 0.1},
        CompsoSettings{.rounding = Rounding::kDither, .block_elems = 1024}}) {
    const Bytes payload = encode_all(settings);
    ASSERT_TRUE(decode_all(settings, payload).ok());
    for (std::size_t i = 0; i < values_.size(); ++i) {
      if (values_[i].empty()) continue;
      EXPECT_LT(relative_error(values_[i], decoded_[i]), settings.error > 0 ? 0.11 : 0.03);
      if (settings.bound == 0) {
        EXPECT_EQ(decoded_[i], values_[i]);
      }
    }
    Bytes longer = payload, shorter(payload.begin(), payload.end() - 1);
    longer.push_back(std::byte{0});
    EXPECT_EQ(decode_all(settings, longer).code(), StatusCode::kCorruptData);
    EXPECT_EQ(decode_all(settings, shorter).code(), StatusCode::kCorruptData);
  }
}

TEST(Compso, LayersShareOneTable) {
  const std::vector<float> layer = normals(4096);
  const CompsoSettings settings = {};
  const std::vector<std::int64_t> elems(16, 4096);
  const std::vector<ConstTensorView> layers(16, {layer.data(), DType::kFloat32, 64, 64});
  Bytes payload(max_compso_bytes(settings, elems, DType::kFloat32)), scratch(compso_scratch_bytes(settings, elems));
  const std::uint64_t together = encode_layers(settings, layers, kContext, payload.data(), scratch.data());
  EXPECT_LT(together + 15 * 150, 16 * encode("compso(filter=off)", layer).size());
}

// ---- sections ------------------------------------------------------------------------------------------------------

// `quiet` values of a hundredth behind as many of N(0, 1).
std::vector<float> loud_then_quiet(std::size_t quiet) {
  std::vector<float> values = normals(2 * quiet);
  for (std::size_t i = quiet; i < values.size(); ++i) values[i] *= 0.01f;
  return values;
}

TEST(Compso, PartsThatDifferHaveTablesOfTheirOwn) {
  const std::vector<float> values = loud_then_quiet(262144);
  const auto half = values.begin() + 262144;
  for (const char* spec : {"compso(filter=off)", "compso(bound=0.001)", "compso(error=0.003, round=dead_zone)"}) {
    const Bytes payload = encode(spec, values);
    EXPECT_EQ(std::to_integer<int>(payload[1]), 1) << spec;  // one section more
    EXPECT_LT(relative_error(values, round_trip(spec, values)), 0.15) << spec;
  }
  // Beyond the loud half a bit a value: the quiet one is 0 or a step, four to one.
  const std::size_t together = encode("compso(filter=off)", values).size();
  const std::size_t loud = encode("compso(filter=off)", {values.begin(), half}).size();
  EXPECT_LT(static_cast<double>(together), static_cast<double>(loud) + 0.14 * 262144);
  // What is alike has one.
  EXPECT_EQ(std::to_integer<int>(encode("compso(filter=off)", normals(524288))[1]), 0);
}

TEST(Compso, SectionsMayBeginAnywhere) {
  const auto codec = make_codec("compso(bound=0.25, round=nearest)").value();
  const auto decode_bytes = [&](std::vector<int> ints) {
    Bytes payload;
    for (const int i : ints) payload.push_back(static_cast<std::byte>(i));
    std::vector<float> values(5);
    Bytes scratch(codec->scratch_bytes(1, 5, DType::kFloat32));
    const Status status = codec->decode(payload, {values.data(), DType::kFloat32, 1, 5}, scratch);
    return status.ok() ? testing::PrintToString(values) : status.message().substr(status.message().find(": ") + 2);
  };
  std::vector<int> bytes = {1, 1, 0, 0, 0, 0, 0, 0, 0, 0,    0,   0x3f, 0xfe, 0xff, 0xff, 0xff,                       //
                            3, 0, 0, 0, 0, 0, 0, 0, 4, 0,    0,   0,    0,    0,    0,    0,    0, 0x82, 0x80, 0x80,  //
                            3, 0, 0, 0, 0, 0, 0, 0, 0, 0x82, 0x7e};
  EXPECT_EQ(decode_bytes(bytes), "{ 1, 0, 0, 1, -1 }");
  const auto with = [&](std::size_t at, int byte) {
    std::vector<int> damaged = bytes;
    damaged[at] = byte;
    return decode_bytes(damaged);
  };
  EXPECT_EQ(with(16, 0), "a section of 0 low codes, but not the last, where 5 are left");
  EXPECT_EQ(with(16, 5), "a section of 5 low codes, but not the last, where 5 are left");
  EXPECT_EQ(with(24, 200), "200 bytes of low codes, but 15 bytes are left");
  EXPECT_EQ(with(1, 2), "11 bytes left for low codes, expected at least 16");
  EXPECT_EQ(with(7, 255), "11 bytes left for low codes, expected at least 16");
  bytes.push_back(0);
  EXPECT_EQ(decode_bytes(bytes), "1 bytes behind the low codes, expected none");
}

// ---- groups --------------------------------------------------------------------------------------------------------

// Every third group of 256 is not 0, with its last value as small as the others; the last group has 17.
std::vector<float> sparse(std::size_t elems) {
  std::vector<float> values = normals(elems);
  for (std::size_t i = 0; i < elems; ++i) {
    if (i / 256 % 3 != 1) values[i] = 0;
  }
  return values;
}

TEST(Compso, GroupsOfZerosAreLeftOut) {
  const std::vector<float> values = sparse(79 * 256 + 17);
  for (const char* settings : {"bound=0.004", "bound=0.0005", "bound=0.004, round=dither", "bound=0.004, filter=off",
                               "error=0.1, round=dead_zone", "bound=0.01, round=nearest, block=1024"}) {
    const std::string spec = std::string("compso(") + settings + ")";
    const Bytes payload = encode(spec, values);
    EXPECT_NE(std::to_integer<unsigned>(payload[0]) & kCompsoLeavesOut, 0u) << spec;
    std::vector<float> decoded(values.size()), plain(values.size());
    ASSERT_TRUE(decode(spec, payload, &decoded).ok()) << spec;
    const std::string without = std::string("compso(") + settings + ", coder=none)";
    ASSERT_TRUE(decode(without, encode(without, values), &plain).ok()) << spec;
    EXPECT_EQ(decoded, plain) << spec;
  }
  // The codes of the others alone, and 10 bytes.
  std::vector<float> others;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (i / 256 % 3 == 1) others.push_back(values[i]);
  }
  const char* spec = "compso(filter=off, round=nearest)";
  EXPECT_EQ(encode(spec, values).size(), encode(spec, others).size() + 10);
}

TEST(Compso, AllGroupsMayBeLeftOutAndNone) {
  const std::vector<float> zeros(5000), bad(5000, kNan);
  const Bytes payload = encode("compso", zeros);
  EXPECT_EQ(payload.size(), 8u + 8 + 8 + 3);
  EXPECT_EQ(round_trip("compso", zeros), zeros);
  EXPECT_EQ(encode("compso", bad).size(), payload.size());
  for (const float value : round_trip("compso", bad)) ASSERT_TRUE(std::isnan(value));
  EXPECT_EQ(std::to_integer<int>(encode("compso", normals(5000))[0]), 1);
  // Too small a message.
  EXPECT_EQ(std::to_integer<int>(encode("compso", std::vector<float>(4095))[0]), 1);
}

// Groups begin anew with each layer.
TEST(Compso, LayersLeaveOutGroups) {
  const std::vector<float> layer = sparse(3 * 256 + 40), other = sparse(5 * 1024 + 300);
  const std::vector<ConstTensorView> layers = {{layer.data(), DType::kFloat32, 1, 3 * 256 + 40},
                                               {other.data(), DType::kFloat32, 1, 5 * 1024 + 300},
                                               {layer.data(), DType::kFloat32, 1, 3 * 256 + 40}};
  const std::vector<std::int64_t> elems = {3 * 256 + 40, 5 * 1024 + 300, 3 * 256 + 40};
  std::vector<std::vector<float>> decoded[2];
  for (const bool is_coded : {true, false}) {
    const CompsoSettings settings = {.bound = 1e-3, .filter = 1e-3, .is_coded = is_coded, .block_elems = 1024};
    Bytes payload(max_compso_bytes(settings, elems, DType::kFloat32)), scratch(compso_scratch_bytes(settings, elems));
    payload.resize(encode_layers(settings, layers, kContext, payload.data(), scratch.data()));
    EXPECT_EQ(std::to_integer<unsigned>(payload[0]), is_coded ? 2 + kCompsoLeavesOut : 2);
    std::vector<TensorView> outputs;
    for (const std::int64_t count : elems) {
      decoded[is_coded].emplace_back(static_cast<std::size_t>(count));
      outputs.push_back({decoded[is_coded].back().data(), DType::kFloat32, 1, count});
    }
    ASSERT_TRUE(decode_layers(settings, payload, outputs, scratch.data()).ok());
  }
  EXPECT_EQ(decoded[0], decoded[1]);
  EXPECT_LT(relative_error(other, decoded[1][1]), 0.01);
}

TEST(Compso, DamagedFlagsOfGroupsAreNamed) {
  const std::vector<float> values = sparse(20 * 256 + 17);
  const Bytes good = encode("compso", values);
  const auto error = [&](const Bytes& payload) {
    std::vector<float> decoded(values.size());
    const std::string text = decode("compso", payload, &decoded).to_string();
    return text.substr(text.find("): ") + 3);
  };
  Bytes bytes = good;
  bytes.back() |= std::byte{0x20};
  EXPECT_EQ(error(bytes), "the last byte, 0x29, has flags of more than 21 groups");
  bytes = good;
  bytes[bytes.size() - 2] ^= std::byte{4};  // a group more than there are codes, or one fewer
  EXPECT_NE(error(bytes), "ok");
  bytes = good;
  bytes.resize(18);
  EXPECT_EQ(error(bytes), "2 bytes left for codes and the flags of 21 groups");
  bytes = good;
  bytes[0] = std::byte{1};
  EXPECT_NE(error(bytes), "ok");
}

// ---- refusals ------------------------------------------------------------------------------------------------------

TEST(Compso, WrongSpecificationsAreRefused) {
  const auto error = [](const char* spec) { return make_codec(spec).status().message(); };
  EXPECT_EQ(error("compso(bound=1e-5)"), "compso: bound must be 0 (lossless) or from 0.0001 to 1, got 1e-5");
  EXPECT_EQ(error("compso(bound=0.1, error=0.1)"), "compso: expected one of bound and error");
  EXPECT_EQ(error("compso(filter=0.1, round=dither)"),
            "compso: filter goes neither with error nor with round=dither, which decodes zeros as noise");
  EXPECT_EQ(error("compso(block=1500)"), "compso: block must be a multiple of 1024, got 1500");
}

TEST(Compso, DamageIsNamed) {
  std::string spec = "compso(coder=none)";
  Bytes good = encode(spec, {1, -1, 0.5f});
  const auto error = [&](std::size_t at, int byte) {
    Bytes bytes = good;
    bytes[at] = static_cast<std::byte>(byte);
    std::vector<float> values(3);
    const std::string text = decode(spec, bytes, &values).to_string();
    return text.substr(text.find("): ") + 3);
  };
  EXPECT_EQ(error(0, 2), "the payload begins with 2 bytes a code, expected 1");
  EXPECT_EQ(error(11, 0xbf), "block 0 has the step -0.512 and the smallest level -125");
  EXPECT_EQ(error(14, 0x7f), "block 0 has the step 0.008 and the smallest level -8388733");

  spec = "compso(error=0.5, round=dead_zone, coder=none)";
  good = encode(spec, {1, -1, 0.5f});
  EXPECT_EQ(error(19, 0x40), "block 0 has levels 7.99951 steps outwards, expected -1 to 1");
}

}  // namespace
}  // namespace cortado
