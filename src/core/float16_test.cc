// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/float16.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace cortado {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

float from_bits(std::uint32_t bits) { return std::bit_cast<float>(bits); }

TEST(Float16, EveryFp16SurvivesARoundTrip) {
  for (std::uint32_t h = 0; h < 0x10000; ++h) {
    const auto half = static_cast<std::uint16_t>(h);
    const bool is_nan = (h & 0x7fff) > 0x7c00;
    EXPECT_EQ(float_to_fp16(fp16_to_float(half)), is_nan ? half | 0x0200 : half);
  }
}

TEST(Float16, EveryBf16SurvivesARoundTrip) {
  for (std::uint32_t b = 0; b < 0x10000; ++b) {
    const auto brain = static_cast<std::uint16_t>(b);
    const bool is_nan = (b & 0x7fff) > 0x7f80;
    EXPECT_EQ(float_to_bf16(bf16_to_float(brain)), is_nan ? brain | 0x0040 : brain);
  }
}

// All finite fp16 values of one sign are ordered like their bits, and so are the midpoints between them.
TEST(Float16, MidpointsGoToEvenAndTheirNeighboursToTheNearest) {
  for (std::uint32_t h = 0; h < 0x7c00; ++h) {
    // The value after the largest finite one would be 2^16; numbers from the midpoint on become Inf.
    const double low = fp16_to_float(static_cast<std::uint16_t>(h));
    const double high = h == 0x7bff ? 65536.0 : fp16_to_float(static_cast<std::uint16_t>(h + 1));
    const auto middle = static_cast<float>((low + high) / 2);
    EXPECT_EQ(float_to_fp16(middle), h % 2 == 0 ? h : h + 1);
    EXPECT_EQ(float_to_fp16(std::nextafter(middle, 0.0f)), h);
    EXPECT_EQ(float_to_fp16(std::nextafter(middle, kInf)), h + 1);
    EXPECT_EQ(float_to_fp16(-middle), 0x8000u | (h % 2 == 0 ? h : h + 1));
  }
}

TEST(Float16, Bf16MidpointsGoToEven) {
  for (std::uint32_t b = 0; b < 0x7f80; ++b) {
    const std::uint32_t middle = b << 16 | 0x8000u;
    EXPECT_EQ(float_to_bf16(from_bits(middle)), b % 2 == 0 ? b : b + 1);
    EXPECT_EQ(float_to_bf16(from_bits(middle - 1)), b);
    EXPECT_EQ(float_to_bf16(from_bits(middle + 1)), b + 1);
  }
}

struct Special {
  std::uint32_t bits;
  std::uint16_t fp16, bf16;
};

TEST(Float16, SpecialValues) {
  const std::vector<Special> specials = {
      {0x00000000, 0x0000, 0x0000},                                // 0
      {0x80000000, 0x8000, 0x8000},                                // -0
      {0x3f800000, 0x3c00, 0x3f80},                                // 1
      {0x7f800000, 0x7c00, 0x7f80},                                // Inf
      {0xff800000, 0xfc00, 0xff80},                                // -Inf
      {0x477fe000, 0x7bff, 0x4780},                                // 65504
      {0x477fefff, 0x7bff, 0x4780},                                // just below 65520
      {0x477ff000, 0x7c00, 0x4780},                                // 65520
      {0x7f7fffff, 0x7c00, 0x7f80},                                // largest finite float32
      {0x7f7f7fff, 0x7c00, 0x7f7f},                                // rounds to the largest finite bf16
      {0x33000000, 0x0000, 0x3300},                                // 2^-25
      {0x33000001, 0x0001, 0x3300}, {0x00000001, 0x0000, 0x0000},  // smallest denormal
      {0x00010001, 0x0000, 0x0001}, {0x807fffff, 0x8000, 0x8080},  // a denormal that rounds to a normal bf16
      {0x7fc00000, 0x7e00, 0x7fc0},                                // quiet NaN
      {0x7f800001, 0x7e00, 0x7fc0},  // signalling NaN whose payload does not fit: stays NaN
      {0xffbfffff, 0xffff, 0xffff},  // signalling NaN
  };
  for (const Special& special : specials) {
    EXPECT_EQ(float_to_fp16(from_bits(special.bits)), special.fp16) << std::hex << special.bits;
    EXPECT_EQ(float_to_bf16(from_bits(special.bits)), special.bf16) << std::hex << special.bits;
  }
}

TEST(Float16, WideningNanIsQuietForFp16AndExactForBf16) {
  EXPECT_EQ(std::bit_cast<std::uint32_t>(fp16_to_float(0x7c01)), 0x7fc02000u);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(bf16_to_float(0x7f81)), 0x7f810000u);
  EXPECT_EQ(fp16_to_float(0x0001), 0x1p-24f);
  EXPECT_EQ(fp16_to_float(0x83ff), -0x3ffp-24f);
}

}  // namespace
}  // namespace cortado
