// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "collective/combine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

namespace cortado {
namespace {

// All-reduces one vector a rank and returns the result after checking that all ranks have the same bytes.
template <typename Element>
std::vector<Element> all_reduce(DType dtype, std::vector<std::vector<Element>> of_rank) {
  std::vector<CollectiveCall> calls;
  for (auto& values : of_rank) {
    calls.push_back({.kind = CollectiveKind::kAllReduce,
                     .dtype = dtype,
                     .sent = values.data(),
                     .received = values.data(),
                     .elems = static_cast<std::int64_t>(values.size())});
  }
  combine(calls);
  for (const auto& values : of_rank) {
    EXPECT_TRUE(values.empty() || std::memcmp(values.data(), of_rank[0].data(), values.size() * sizeof(Element)) == 0);
  }
  return of_rank[0];
}

using Halves = std::vector<std::uint16_t>;

TEST(Combine, SumsFloat32InRankOrder) {
  // (1e8 + 1) + -1e8 loses the 1, (1e8 + -1e8) + 1 keeps it.
  EXPECT_EQ(all_reduce<float>(DType::kFloat32, {{1e8f}, {1}, {-1e8f}}), std::vector<float>{0});
  EXPECT_EQ(all_reduce<float>(DType::kFloat32, {{1e8f}, {-1e8f}, {1}}), std::vector<float>{1});
}

TEST(Combine, RoundsFloat16OnceToNearestEven) {
  constexpr std::uint16_t k1 = 0x3C00, k2048 = 0x6800, k2050 = 0x6801, k2052 = 0x6802;  // steps of 2 above 2048
  EXPECT_EQ(all_reduce(DType::kFloat16, std::vector<Halves>{{k2048}, {k1}, {k1}}), Halves{k2050});
  EXPECT_EQ(all_reduce(DType::kFloat16, std::vector<Halves>{{k2048}, {k1}}), Halves{k2048});  // 2049 lies half-way
  EXPECT_EQ(all_reduce(DType::kFloat16, std::vector<Halves>{{k2050}, {k1}}), Halves{k2052});  // 2051 too
}

TEST(Combine, RoundsBFloat16OnceToNearestEven) {
  constexpr std::uint16_t k1 = 0x3F80, k256 = 0x4380, k258 = 0x4381, k260 = 0x4382;  // steps of 2 above 256
  EXPECT_EQ(all_reduce(DType::kBFloat16, std::vector<Halves>{{k256}, {k1}, {k1}}), Halves{k258});
  EXPECT_EQ(all_reduce(DType::kBFloat16, std::vector<Halves>{{k256}, {k1}}), Halves{k256});
  EXPECT_EQ(all_reduce(DType::kBFloat16, std::vector<Halves>{{k258}, {k1}}), Halves{k260});
}

TEST(Combine, OverflowsToInfinity) {
  constexpr std::uint16_t kLargest = 0x7BFF, kInfinity = 0x7C00;
  EXPECT_EQ(all_reduce(DType::kFloat16, std::vector<Halves>{{kLargest}, {kLargest}}), Halves{kInfinity});
}

TEST(Combine, PropagatesInfinityAndNan) {
  const float infinity = std::numeric_limits<float>::infinity();
  const auto sums = all_reduce<float>(DType::kFloat32, {{infinity, infinity, NAN, 1}, {1, -infinity, 1, 1}});
  EXPECT_EQ(sums[0], infinity);
  EXPECT_TRUE(std::isnan(sums[1]));
  EXPECT_TRUE(std::isnan(sums[2]));
  EXPECT_EQ(sums[3], 2);

  const auto halves = all_reduce(DType::kFloat16, std::vector<Halves>{{0x3C00, 0x3C00}, {0x7C00, 0x7E01}});
  EXPECT_EQ(halves[0], 0x7C00);
  EXPECT_GT(halves[1] & 0x7FFF, 0x7C00) << "a NaN has a mantissa";
  const auto brains = all_reduce(DType::kBFloat16, std::vector<Halves>{{0x3F80, 0x3F80}, {0xFF80, 0x7FC1}});
  EXPECT_EQ(brains[0], 0xFF80);
  EXPECT_GT(brains[1] & 0x7FFF, 0x7F80);
}

TEST(Combine, WrapsUint8) {
  const std::vector<std::uint8_t> sums = all_reduce<std::uint8_t>(DType::kUint8, {{250, 1, 255}, {250, 2, 255}});
  EXPECT_EQ(sums, (std::vector<std::uint8_t>{244, 3, 254}));
}

TEST(Combine, OneRankKeepsEveryBit) {
  const Halves values{0x7C01, 0xFC01, 0x8000};  // signalling NaNs, minus zero
  EXPECT_EQ(all_reduce(DType::kFloat16, std::vector<Halves>{values}), values);
}

TEST(Combine, SumsWhatDoesNotFillATile) {
  for (const std::size_t elems : {0, 1, 2047, 2048, 2049, 10000}) {
    std::vector<float> values(elems), expected(elems);
    std::iota(values.begin(), values.end(), 0.0f);
    for (std::size_t i = 0; i < elems; ++i) expected[i] = 3 * values[i];
    EXPECT_EQ(all_reduce<float>(DType::kFloat32, {values, values, values}), expected) << elems;
  }
}

TEST(Combine, GathersInRankOrderAlsoInPlace) {
  std::vector<std::vector<char>> received{{'a', 'b', '-', '-'}, {'-', '-', 'c', 'd'}};  // own bytes are in place
  std::vector<CollectiveCall> calls;
  for (std::size_t rank = 0; rank < 2; ++rank) {
    calls.push_back({.kind = CollectiveKind::kAllGather,
                     .sent = received[rank].data() + 2 * rank,
                     .received = received[rank].data(),
                     .elems = 2});
  }
  combine(calls);
  for (const auto& bytes : received) EXPECT_EQ(std::string(bytes.begin(), bytes.end()), "abcd");
}

}  // namespace
}  // namespace cortado
