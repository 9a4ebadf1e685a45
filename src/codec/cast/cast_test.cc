// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/cast/cast.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "core/float16.h"

namespace cortado {
namespace {

using Bytes = std::vector<std::byte>;

template <typename T>
std::vector<T> through(const char* spec, const std::vector<T>& values, DType dtype, Bytes* payload) {
  const std::unique_ptr<Codec> codec = make_codec(spec).value();
  const auto cols = static_cast<std::int64_t>(values.size());
  payload->resize(codec->max_payload_bytes(1, cols, dtype));
  EXPECT_EQ(codec->encode({values.data(), dtype, 1, cols}, {}, *payload, {}).value(), payload->size());
  std::vector<T> output(values.size());
  EXPECT_TRUE(codec->decode(*payload, {output.data(), dtype, 1, cols}, {}).ok());
  return output;
}

Bytes bytes(std::initializer_list<int> values) {
  Bytes result;
  for (const int value : values) result.push_back(static_cast<std::byte>(value));
  return result;
}

TEST(Cast, TheWorkedExamplesOfItsSpec) {
  const std::vector<float> values = {1.0f, -2.5f, 0.1f, 70000.0f};
  Bytes payload;
  EXPECT_EQ(through("cast(bf16)", values, DType::kFloat32, &payload),
            (std::vector<float>{1.0f, -2.5f, 0.10009765625f, 70144.0f}));
  EXPECT_EQ(payload, bytes({0x80, 0x3f, 0x20, 0xc0, 0xcd, 0x3d, 0x89, 0x47}));
  EXPECT_EQ(through("cast(fp16)", values, DType::kFloat32, &payload),
            (std::vector<float>{1.0f, -2.5f, 0.0999755859375f, std::numeric_limits<float>::infinity()}));
  EXPECT_EQ(payload, bytes({0x00, 0x3c, 0x00, 0xc1, 0x66, 0x2e, 0x00, 0x7c}));
}

TEST(Cast, TheSameFormatKeepsEveryBit) {
  std::vector<std::uint16_t> all(0x10000);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  Bytes payload;
  EXPECT_EQ(through("cast(bf16)", all, DType::kBFloat16, &payload), all);
  EXPECT_EQ(through("cast(fp16)", all, DType::kFloat16, &payload), all);
}

TEST(Cast, BetweenThe16BitFormatsItRoundsOnceEachWay) {
  std::vector<std::uint16_t> all(0x10000), expected_fp16(0x10000), expected_bf16(0x10000);
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i] = static_cast<std::uint16_t>(i);
    expected_fp16[i] = float_to_fp16(bf16_to_float(float_to_bf16(fp16_to_float(all[i]))));
    expected_bf16[i] = float_to_bf16(fp16_to_float(float_to_fp16(bf16_to_float(all[i]))));
  }
  Bytes payload;
  EXPECT_EQ(through("cast(bf16)", all, DType::kFloat16, &payload), expected_fp16);
  EXPECT_EQ(through("cast(fp16)", all, DType::kBFloat16, &payload), expected_bf16);
}

TEST(Cast, RelativeErrorOfFiniteValuesStaysWithinHalfAUnit) {
  std::vector<float> values;
  for (float x = 0x1p-14f; x < 60000.0f; x *= 1.0009765f) values.push_back(x);
  Bytes payload;
  const std::vector<float> bf16 = through("cast(bf16)", values, DType::kFloat32, &payload);
  const std::vector<float> fp16 = through("cast(fp16)", values, DType::kFloat32, &payload);
  for (std::size_t i = 0; i < values.size(); ++i) {
    EXPECT_NEAR(bf16[i], values[i], values[i] * 0x1p-8f);
    EXPECT_NEAR(fp16[i], values[i], values[i] * 0x1p-11f);
  }
}

TEST(Cast, RefusesWhatItCannotDo) {
  const std::unique_ptr<Codec> codec = make_codec("cast").value();
  EXPECT_EQ(codec->spec(), "cast(bf16)");
  std::vector<std::uint8_t> values(4);
  Bytes payload(8);
  const Status status = codec->encode({values.data(), DType::kUint8, 2, 2}, {}, payload, {}).status();
  EXPECT_EQ(status.to_string(), "unsupported: cast(bf16) takes fp32, fp16 and bf16, got uint8");
  EXPECT_EQ(make_codec("cast(fp8)").status().to_string(),
            "invalid argument: cast(fp8): dtype must be bf16 or fp16, got \"fp8\"");
}

}  // namespace
}  // namespace cortado
