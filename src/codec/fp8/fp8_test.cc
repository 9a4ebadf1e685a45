// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/fp8/fp8.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "codec/fp8/fp8_kernels.h"
#include "codec/stage.h"
#include "core/philox.h"
#include "core/simd_target.h"

namespace cortado::fp8_test {
namespace {

using Bytes = std::vector<std::byte>;

// ---- the reference -------------------------------------------------------------------------------------------------

float value_of(const Fp8Format& f, std::uint8_t code) {
  const int exponent = (code & 0x7f) >> f.mantissa_bits, mantissa = code & ((1 << f.mantissa_bits) - 1);
  const int significand = exponent == 0 ? mantissa : mantissa + (1 << f.mantissa_bits);
  const double magnitude = std::ldexp(significand, std::max(exponent, 1) - f.bias - f.mantissa_bits);
  return static_cast<float>(code & 0x80 ? -magnitude : magnitude);
}

// The nearest, ties to the even code; by looking at all of them.
std::uint8_t code_of(const Fp8Format& f, float value) {
  std::uint8_t best = 0;
  for (std::uint8_t code = 1; code <= f.largest_code; ++code) {
    const double distance = std::fabs(std::fabs(static_cast<double>(value)) - value_of(f, code));
    const double nearest = std::fabs(std::fabs(static_cast<double>(value)) - value_of(f, best));
    if (distance < nearest || (distance == nearest && code % 2 == 0)) best = code;
  }
  return std::signbit(value) ? best | 0x80 : best;
}

constexpr Fp8Format kFormats[] = {kE4M3, kE5M2};

std::uint8_t through_kernel(const Fp8Format& format, const std::vector<float>& values, std::size_t at) {
  const BlockGrid grid{.step = 1, .inverse = 1};
  float row[16];
  std::uint8_t codes[16];
  std::memcpy(row, values.data() + at, sizeof(row));
  to_fp8(format, {.log2_block_elems = 5, .blocks = &grid, .first = 0, .elems = 16}, row, 0, codes);
  return codes[0];
}

TEST(Fp8, TheFormatsAreThoseOfTheStandard) {
  EXPECT_EQ(value_of(kE4M3, 0x7e), 448);
  EXPECT_EQ(value_of(kE4M3, 0x08), 0x1p-6f);
  EXPECT_EQ(value_of(kE4M3, 0x01), 0x1p-9f);
  EXPECT_EQ(value_of(kE5M2, 0x7b), 57344);
  EXPECT_EQ(value_of(kE5M2, 0x04), 0x1p-14f);
  EXPECT_EQ(value_of(kE5M2, 0x01), 0x1p-16f);
  for (const Fp8Format& f : kFormats) EXPECT_EQ(value_of(f, f.largest_code), f.largest);
}

// Every code's value, the middles between neighbours, the floats beside both, and some at random.
TEST(Fp8, RoundsToTheNearestTiesToEvenOnEveryTarget) {
  for (const Fp8Format& format : kFormats) {
    std::vector<float> values;
    for (int code = 0; code < format.largest_code; ++code) {
      const float low = value_of(format, static_cast<std::uint8_t>(code));
      const float high = value_of(format, static_cast<std::uint8_t>(code + 1));
      for (const float v : {low, (low + high) / 2, high}) {
        for (const float beside : {std::nextafter(v, 0.0f), v, std::min(std::nextafter(v, 1e9f), format.largest)}) {
          values.push_back(beside);
          values.push_back(-beside);
        }
      }
    }
    for (std::uint64_t i = 0; i < 2000; ++i) {
      const std::uint32_t bits = philox_block(1, 2, 3, i)[0];
      values.push_back(std::ldexp(static_cast<float>(bits % 1000) / 1000, static_cast<int>(bits >> 16) % 20 - 12));
      values.back() = std::min(values.back(), format.largest);
    }
    std::vector<std::uint8_t> expected;
    for (const float v : values) expected.push_back(code_of(format, v));
    values.resize(values.size() + 16);
    for (const std::int64_t target : simd_targets()) {
      const ForcedSimdTarget forced(target);
      for (std::size_t i = 0; i < expected.size(); ++i) {
        ASSERT_EQ(through_kernel(format, values, i), expected[i])
            << values[i] << " to " << format.largest << " on " << simd_target_name(target);
      }
    }
  }
}

TEST(Fp8, WidensAllCodesOnEveryTarget) {
  std::vector<std::uint8_t> codes(256);
  for (std::size_t i = 0; i < 256; ++i) codes[i] = static_cast<std::uint8_t>(i);
  const BlockGrid grid{.step = 0.25f};
  std::vector<float> values(256);
  for (const Fp8Format& format : kFormats) {
    for (const std::int64_t target : simd_targets()) {
      const ForcedSimdTarget forced(target);
      from_fp8(format, {.log2_block_elems = 8, .blocks = &grid, .first = 0, .elems = 256}, codes.data(), false,
               values.data());
      for (std::size_t i = 0; i < 256; ++i) {
        if ((i & 0x7f) > format.largest_code) continue;
        ASSERT_EQ(values[i], value_of(format, codes[i]) / 4) << i;
        ASSERT_EQ(std::signbit(values[i]), i >= 128) << i;
      }
    }
  }
}

// ---- the codec -----------------------------------------------------------------------------------------------------

Bytes encoded(const Codec& codec, const std::vector<float>& values) {
  const auto elems = static_cast<std::int64_t>(values.size());
  Bytes payload(codec.max_payload_bytes(1, elems, DType::kFloat32));
  EXPECT_EQ(codec.encode({values.data(), DType::kFloat32, 1, elems}, {}, payload, {}).value(), payload.size());
  return payload;
}

Status decode(const Codec& codec, const Bytes& payload, std::vector<float>* output) {
  return codec.decode(payload, {output->data(), DType::kFloat32, 1, static_cast<std::int64_t>(output->size())}, {});
}

std::vector<float> through(const char* spec, const std::vector<float>& values) {
  const std::unique_ptr<Codec> codec = make_codec(spec).value();
  std::vector<float> output(values.size());
  const Status status = decode(*codec, encoded(*codec, values), &output);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return output;
}

Bytes bytes(std::initializer_list<int> values) {
  Bytes result;
  for (const int value : values) result.push_back(static_cast<std::byte>(value));
  return result;
}

TEST(Fp8, TheWorkedExamplesOfItsSpec) {
  const std::vector<float> values = {1.0f, -2.5f, 0.1f, 70.0f, 0.0f};
  EXPECT_EQ(encoded(*make_codec("fp8").value(), values), bytes({0x7d, 0x48, 0xd2, 0x2d, 0x79, 0x00}));
  EXPECT_EQ(through("fp8", values), (std::vector<float>{1, -2.5f, 0.1015625f, 72, 0}));
  EXPECT_EQ(encoded(*make_codec("fp8(e5m2)").value(), values), bytes({0x76, 0x60, 0xe5, 0x52, 0x78, 0x00}));
  EXPECT_EQ(through("fp8(e5m2)", values), (std::vector<float>{1, -2.5f, 0.09375f, 64, 0}));
}

// 2^-4 and 2^-3 of the value, or half the smallest denormal of the block, which is at most 2^-17 and 2^-31 of its
// largest value.
TEST(Fp8, ErrorsOfAllFiniteValuesAreBounded) {
  struct Bound {
    const char* spec;
    double relative, of_largest;
    Fp8Format format;
  };
  const Bound bounds[] = {{"fp8(e4m3, block=64)", 0x1p-4, 0x1p-17, kE4M3},
                          {"fp8(e5m2, block=64)", 0x1p-3, 0x1p-30, kE5M2}};
  std::vector<float> values(64 * 300);
  philox_fill_normal(1, 0, 0, values.data(), static_cast<std::int64_t>(values.size()));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const int block = static_cast<int>(i / 64);
    // Blocks of all sizes, with values of up to 40 binades in each; the last ones reach the largest float32.
    values[i] = std::ldexp(values[i], block - 174 - static_cast<int>(i % 40));
    if (std::isinf(values[i])) values[i] = std::copysign(std::numeric_limits<float>::max(), values[i]);
  }
  for (const Bound& bound : bounds) {
    const std::vector<float> output = through(bound.spec, values);
    for (std::size_t first = 0; first < values.size(); first += 64) {
      float most = 0;
      for (std::size_t i = first; i < first + 64; ++i) most = std::max(most, std::fabs(values[i]));
      const double least = std::max(most * bound.of_largest, 0x1p-117);
      // Where rounding up would be Inf, the last value is all there is.
      const double relative = most > 0x1p127 ? 2 * bound.relative : bound.relative;
      for (std::size_t i = first; i < first + 64; ++i) {
        const double error = std::fabs(static_cast<double>(output[i]) - values[i]);
        ASSERT_LE(error, std::max(relative * std::fabs(values[i]), least)) << bound.spec << " " << values[i];
      }
    }
  }
}

// The scale is the smallest power of two at which nothing overflows.
TEST(Fp8, TheScaleIsThatOfTheLargestValue) {
  const auto scale_of = [](const char* spec, float largest) {
    return std::to_integer<int>(encoded(*make_codec(spec).value(), {0.5f * largest, largest}).front()) - 127;
  };
  EXPECT_EQ(scale_of("fp8(e4m3)", 448.0f), 0);
  EXPECT_EQ(scale_of("fp8(e4m3)", std::nextafter(448.0f, 500.0f)), 1);
  EXPECT_EQ(scale_of("fp8(e4m3)", 256.0f), 0);
  EXPECT_EQ(scale_of("fp8(e4m3)", std::nextafter(256.0f, 0.0f)), 0);
  EXPECT_EQ(scale_of("fp8(e4m3)", 224.0f), -1);
  EXPECT_EQ(scale_of("fp8(e5m2)", 57344.0f), 0);
  EXPECT_EQ(scale_of("fp8(e5m2)", 1.75f), -15);
  EXPECT_EQ(scale_of("fp8(e4m3)", 1e-44f), -108);
  EXPECT_EQ(scale_of("fp8(e4m3)", 0.0f), -108);
  EXPECT_EQ(scale_of("fp8(e4m3)", std::numeric_limits<float>::max()), 120);
  EXPECT_EQ(scale_of("fp8(e4m3)", std::numeric_limits<float>::infinity()), 128);
}

TEST(Fp8, DamageIsNamed) {
  const std::unique_ptr<Codec> codec = make_codec("fp8").value();
  const std::string place = "corrupt data: fp8(e4m3, block=256): decode of 1 x 300 fp32: ";
  std::vector<float> values(300, 3.0f), output(300);
  const Bytes good = encoded(*codec, values);
  ASSERT_EQ(good.size(), 302u);
  ASSERT_TRUE(decode(*codec, good, &output).ok());
  EXPECT_EQ(output, values);
  const auto expect_named = [&](std::size_t at, std::uint8_t value, const char* what) {
    Bytes bad = good;
    bad[at] = std::byte{value};
    EXPECT_EQ(decode(*codec, bad, &output).to_string(), place + what);
  };
  expect_named(1, 18, "a scale is beyond those of finite values");
  expect_named(1, 248, "a scale is beyond those of finite values");
  expect_named(2, 0x7f, "a code stands for no level");
  expect_named(301, 0xff, "a code stands for no level");
}

TEST(Fp8, ItsCodesAreBytes) {
  const std::unique_ptr<Codec> codec = make_codec("fp8(e5m2, block=32)").value();
  std::vector<float> values(100), output(100);
  philox_fill_normal(1, 0, 0, values.data(), 100);
  const Bytes payload = encoded(*codec, values);
  std::vector<std::uint8_t> codes(100);
  Bytes side(codec->quantiser()->max_side_bytes(1, 100));
  ASSERT_EQ(side.size(), 4u);
  const ConstTensorView input(values.data(), DType::kFloat32, 1, 100);
  ASSERT_TRUE(codec->quantiser()->quantise(input, {}, codes, side, {}).ok());
  EXPECT_EQ(codec->quantiser()->code_bits(), 8);
  EXPECT_EQ(std::memcmp(payload.data(), side.data(), 4), 0);
  EXPECT_EQ(std::memcmp(payload.data() + 4, codes.data(), 100), 0);
  ASSERT_TRUE(codec->quantiser()->dequantise(codes, side, {output.data(), DType::kFloat32, 1, 100}, {}).ok());
  EXPECT_EQ(output, through("fp8(e5m2, block=32)", values));
}

}  // namespace
}  // namespace cortado::fp8_test
