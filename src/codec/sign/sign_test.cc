// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/sign/sign.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "codec/conformance_cases.h"
#include "codec/sign/sign_reference.h"
#include "core/simd_target.h"

namespace cortado {
namespace {

using reference::Bytes;
using reference::Floats;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Setting {
  const char* spec;
  SignScale scale;
  std::size_t block_elems;
};
constexpr std::size_t kWhole = std::size_t{1} << 40;
constexpr Setting kSettings[] = {
    {"sign", SignScale::kMeanAbs, kWhole},
    {"sign(block=256)", SignScale::kMeanAbs, 256},
    {"sign(block=272)", SignScale::kMeanAbs, 272},
    {"sign(two_means)", SignScale::kTwoMeans, kWhole},
    {"sign(two_means, block=1024)", SignScale::kTwoMeans, 1024},
    {"sign(none)", SignScale::kNone, kWhole},
};

Bytes encode(const Codec& codec, const void* values, DType dtype, std::size_t elems) {
  const auto cols = static_cast<std::int64_t>(elems);
  Bytes payload(codec.max_payload_bytes(1, cols, dtype));
  EXPECT_EQ(codec.encode({values, dtype, 1, cols}, {}, payload, {}).value(), payload.size());
  return payload;
}

Floats decode(const Codec& codec, const Bytes& payload, std::size_t elems) {
  Floats output(elems);
  const Status status =
      codec.decode(payload, {output.data(), DType::kFloat32, 1, static_cast<std::int64_t>(elems)}, {});
  EXPECT_TRUE(status.ok()) << status.to_string();
  return output;
}

Floats through(const char* spec, const Floats& values) {
  const std::unique_ptr<Codec> codec = make_codec(spec).value();
  return decode(*codec, encode(*codec, values.data(), DType::kFloat32, values.size()), values.size());
}

Floats normal_values(std::size_t elems) {
  Floats values(elems);
  philox_fill_normal(5, 0, 0, values.data(), static_cast<std::int64_t>(elems));
  return values;
}

Bytes bytes(std::initializer_list<int> values) {
  Bytes result;
  for (const int value : values) result.push_back(static_cast<std::byte>(value));
  return result;
}

bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

double squared_distance(const Floats& a, const Floats& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += std::pow(static_cast<double>(a[i]) - b[i], 2);
  return sum;
}

TEST(Sign, TheWorkedExamplesOfItsSpec) {
  const Floats values = {1.0f, -2.0f, 0.5f, -0.0f, 4.0f, -1.0f, 0.0f, 3.0f, -0.5f};
  const auto payload_of = [&](const char* spec) {
    return encode(*make_codec(spec).value(), values.data(), DType::kFloat32, values.size());
  };
  EXPECT_EQ(payload_of("sign"), bytes({0xab, 0xaa, 0xaa, 0x3f, 0x22, 0x01}));
  EXPECT_EQ(payload_of("sign(two_means)"), bytes({0x55, 0x55, 0xb5, 0x3f, 0x55, 0x55, 0x95, 0xbf, 0x22, 0x01}));
  EXPECT_EQ(payload_of("sign(none)"), bytes({0x00, 0x00, 0x80, 0x3f, 0x22, 0x01}));
  const float m = 4.0f / 3;
  EXPECT_EQ(through("sign", values), (Floats{m, -m, m, m, m, -m, m, m, -m}));
  const float p = 8.5f / 6, n = -3.5f / 3;
  EXPECT_EQ(through("sign(two_means)", values), (Floats{p, n, p, p, p, n, p, p, n}));
  EXPECT_EQ(through("sign(none)", values), (Floats{1, -1, 1, 1, 1, -1, 1, 1, -1}));
}

// The values that `bytes` of some dtype stand for.
Floats widened(const std::vector<std::byte>& bytes, DType dtype) {
  Floats values(bytes.size() / dtype_bytes(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    std::uint32_t element = 0;
    std::memcpy(&element, bytes.data() + i * dtype_bytes(dtype), dtype_bytes(dtype));
    if (dtype == DType::kFloat32) values[i] = std::bit_cast<float>(element);
    if (dtype == DType::kFloat16) values[i] = fp16_to_float(static_cast<std::uint16_t>(element));
    if (dtype == DType::kBFloat16) values[i] = bf16_to_float(static_cast<std::uint16_t>(element));
  }
  return values;
}

TEST(Sign, EverySimdTargetGivesTheBytesOfTheReference) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const std::size_t elems : {1, 7, 8, 15, 16, 17, 255, 256, 300, 1040, 5000}) {
      for (const bool special : {false, true}) {
        const std::vector<std::byte> input = make_values(dtype, static_cast<std::int64_t>(elems), special);
        const Floats values = widened(input, dtype);
        for (const Setting& setting : kSettings) {
          const std::unique_ptr<Codec> codec = make_codec(setting.spec).value();
          const Bytes expected = reference::sign_payload(values, setting.block_elems, setting.scale);
          const Floats output = reference::sign_decoded(expected, elems, setting.block_elems, setting.scale);
          for (const std::int64_t target : simd_targets()) {
            const ForcedSimdTarget forced(target);
            SCOPED_TRACE(std::string(setting.spec) + " " + simd_target_name(target) + " " + std::to_string(elems) +
                         " " + std::string(dtype_name(dtype)));
            ASSERT_EQ(encode(*codec, input.data(), dtype, elems), expected);
            ASSERT_TRUE(same_bits(decode(*codec, expected, elems), output));
          }
        }
      }
    }
  }
}

TEST(Sign, NarrowOutputsAreTheRoundedLevels) {
  const Floats values = {1.0f, -2.0f, 0.3f};  // mean magnitude 1.1
  const std::unique_ptr<Codec> codec = make_codec("sign").value();
  const Bytes payload = encode(*codec, values.data(), DType::kFloat32, values.size());
  std::uint16_t output[3];
  ASSERT_TRUE(codec->decode(payload, {output, DType::kFloat16, 1, 3}, {}).ok());
  EXPECT_EQ(output[0], float_to_fp16(1.1f));
  EXPECT_EQ(output[1], float_to_fp16(-1.1f));
  ASSERT_TRUE(codec->decode(payload, {output, DType::kBFloat16, 1, 3}, {}).ok());
  EXPECT_EQ(output[2], float_to_bf16(1.1f));
}

// Wherever it stands, what is not finite must reach the decoded tensor, for a loss scaler to see.
TEST(Sign, NonFiniteValuesComeOutNonFinite) {
  for (const Setting& setting : kSettings) {
    for (const float bad : {kInf, -kInf, kNaN}) {
      for (const std::size_t at : {0, 15, 299, 599}) {
        Floats values = normal_values(600);
        values[at] = bad;
        EXPECT_FALSE(std::isfinite(through(setting.spec, values)[at])) << setting.spec << " " << bad << " at " << at;
      }
    }
  }
}

TEST(Sign, NonFiniteValuesStayInTheirBlock) {
  Floats values = normal_values(600);
  values[300] = kNaN;
  const Floats output = through("sign(block=256)", values);
  EXPECT_TRUE(std::isfinite(output[255]) && std::isfinite(output[512]));
  EXPECT_TRUE(std::isnan(output[256]) && std::isnan(output[511]));
}

TEST(Sign, FiniteValuesNeverOverflow) {
  const float largest = std::numeric_limits<float>::max();
  const Floats values = {largest, largest, -largest, largest};
  for (const char* spec : {"sign", "sign(two_means)"}) EXPECT_TRUE(same_bits(through(spec, values), values)) << spec;
}

TEST(Sign, ZerosAndDenormals) {
  EXPECT_TRUE(same_bits(through("sign", {0.0f, -0.0f}), {0.0f, 0.0f}));
  EXPECT_TRUE(same_bits(through("sign(two_means)", {0.0f, -0.0f}), {0.0f, 0.0f}));
  EXPECT_TRUE(same_bits(through("sign(none)", {0.0f, -0.0f}), {1.0f, 1.0f}));
  EXPECT_TRUE(same_bits(through("sign", {1e-45f, -1e-45f}), {1e-45f, -1e-45f}));
  EXPECT_TRUE(same_bits(through("sign(two_means)", {1e-45f, -3e-45f}), {1e-45f, -3e-45f}));
}

// What error feedback needs (Karimireddy et al. 2019, lemma 8): |x - C(x)|^2 = (1 - d) |x|^2, where
// d = |x|_1^2 / (n |x|_2^2); about 2/pi for normal values. Two means can only be nearer.
TEST(Sign, MeanAbsContractsAsItsSpecSays) {
  Floats values = normal_values(100000);
  for (std::size_t i = 0; i < 1000; ++i) values[i] = values[i] * 20 + 1;
  double sum = 0, squares = 0;
  for (const float value : values) sum += std::fabs(value), squares += std::pow(static_cast<double>(value), 2);
  const double contraction = 1 - sum * sum / (static_cast<double>(values.size()) * squares);
  const double mean_abs = squared_distance(values, through("sign", values)) / squares;
  EXPECT_NEAR(mean_abs, contraction, 1e-6);
  EXPECT_LT(squared_distance(values, through("sign(block=256)", values)) / squares, mean_abs);
  EXPECT_LE(squared_distance(values, through("sign(two_means)", values)) / squares, mean_abs + 1e-9);
}

TEST(Sign, PayloadsThatNoEncoderWritesAreRefused) {
  const auto error = [](const char* spec, const Bytes& payload) {
    Floats output(9);
    return make_codec(spec).value()->decode(payload, {output.data(), DType::kFloat32, 1, 9}, {}).to_string();
  };
  EXPECT_EQ(error("sign", bytes({0, 0, 0, 0, 0, 2})),
            "corrupt data: sign(scale=mean_abs, block=tensor, vote=mean): decode: the last byte is 0x02, expected 0 "
            "from bit 1 on");
  EXPECT_EQ(error("sign", bytes({0, 0, 0x80, 0xbf, 0, 1})),
            "corrupt data: sign(scale=mean_abs, block=tensor, vote=mean): decode: block 0 has levels -1 and 1, "
            "expected at least 0 or NaN");
  EXPECT_EQ(error("sign(none)", bytes({0, 0, 0, 0x40, 0, 1})),
            "corrupt data: sign(scale=none, block=tensor, vote=mean): decode: block 0 has levels 2 and -2, expected 1 "
            "or NaN");
  EXPECT_EQ(error("sign(two_means)", bytes({0, 0, 0x80, 0x3f, 0, 0, 0x80, 0x3f, 0, 1})),
            "corrupt data: sign(scale=two_means, block=tensor, vote=mean): decode: block 0 has levels 1 and 1, "
            "expected at least 0 and at most 0 or NaN");
  EXPECT_EQ(error("sign", bytes({0, 0, 0x80, 0xff, 0, 1})).find("corrupt data"), 0u) << "-Inf";
  EXPECT_EQ(error("sign", bytes({1, 0, 0xc0, 0x7f, 0, 1})).find("corrupt data"), 0u) << "another NaN";
  EXPECT_EQ(error("sign", bytes({0, 0, 0xc0, 0x7f, 0, 1})), "ok");
}

TEST(Sign, SettingsThatMeanNothingAreRefused) {
  const auto error = [](const char* spec) { return make_codec(spec).status().message(); };
  EXPECT_EQ(error("sign(block=1000)"), "sign(block=1000): block must be a multiple of 16");
  EXPECT_EQ(error("sign(block=128)"),
            "sign(block=128): block must be an integer from 256 to 16777216, or tensor, got \"128\"");
  EXPECT_EQ(error("sign(none, block=256)"), "sign(scale=none, block=256): without a scale there are no blocks");
  EXPECT_EQ(error("sign(two_means, vote=majority)"),
            "sign(scale=two_means, vote=majority): a vote needs one scale for both signs: mean_abs or none");
}

TEST(Sign, TheVoteIsNoMatterOfThePayload) {
  const std::unique_ptr<Codec> mean = make_codec("sign").value();
  const std::unique_ptr<Codec> majority = make_codec("sign(vote=majority)").value();
  EXPECT_FALSE(mean->is_majority_vote());
  EXPECT_TRUE(majority->is_majority_vote());
  const Floats values = normal_values(100);
  EXPECT_EQ(encode(*mean, values.data(), DType::kFloat32, 100), encode(*majority, values.data(), DType::kFloat32, 100));
}

}  // namespace
}  // namespace cortado
