// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "collective/sum_checks.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "core/float16.h"

namespace cortado {
namespace {

constexpr int kRanks = 4;

float load(const std::vector<std::byte>& from, DType dtype, std::size_t i) {
  float value = 0;
  if (dtype == DType::kFloat32) {
    std::memcpy(&value, from.data() + 4 * i, 4);
  } else {
    std::uint16_t half;
    std::memcpy(&half, from.data() + 2 * i, 2);
    value = dtype == DType::kFloat16 ? fp16_to_float(half) : bf16_to_float(half);
  }
  return value;
}

void store(std::vector<std::byte>& to, DType dtype, std::size_t i, float value) {
  if (dtype == DType::kFloat32) {
    std::memcpy(to.data() + 4 * i, &value, 4);
  } else {
    const std::uint16_t half = dtype == DType::kFloat16 ? float_to_fp16(value) : float_to_bf16(value);
    std::memcpy(to.data() + 2 * i, &half, 2);
  }
}

// Contributions of all ranks, their sum rounded after every addition, and the summed checks.
struct Sum {
  Sum(DType dtype, std::int64_t elems, unsigned seed, float scale = 1, int skipped_bytes = 0)
      : dtype(dtype), elems(elems), sums(static_cast<std::size_t>(elems) * dtype_bytes(dtype)) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    checks.resize(static_cast<std::size_t>(sum_check_elems(dtype, elems)));
    for (int rank = 0; rank < kRanks; ++rank) {
      std::vector<std::byte> sent(sums.size());
      for (std::size_t i = 0; i < static_cast<std::size_t>(elems); ++i) {
        store(sent, dtype, i, scale * normal(random));
        const float sum = rank == 0 ? load(sent, dtype, i) : load(sums, dtype, i) + load(sent, dtype, i);
        store(sums, dtype, i, sum);
      }
      sent.insert(sent.begin(), static_cast<std::size_t>(skipped_bytes), std::byte{});
      std::vector<float> own(checks.size());
      write_sum_checks(sent.data() + skipped_bytes, dtype, elems, own.data());
      for (std::size_t c = 0; c < own.size(); ++c) checks[c] = rank == 0 ? own[c] : checks[c] + own[c];
    }
  }
  Status compare() const { return compare_with_sum_checks(sums.data(), dtype, elems, checks.data(), kRanks); }

  DType dtype;
  std::int64_t elems;
  std::vector<std::byte> sums;
  std::vector<float> checks;
};

TEST(SumChecks, RoundingIsNoDamage) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const std::int64_t elems : {0, 1, 2, 3, 17, 64, 65, 1000, 1024, 1025, 5000}) {
      for (const float scale : {1e-30f, 1e-6f, 1.0f, 1e4f, 1e30f}) {
        for (unsigned seed = 0; seed < 5; ++seed) {
          const Sum sum(dtype, elems, seed, scale);
          EXPECT_TRUE(sum.compare().ok())
              << dtype_name(dtype) << " " << elems << ", scale " << scale << ": " << sum.compare().to_string();
        }
      }
    }
  }
}

TEST(SumChecks, ValuesNeedNoAlignment) { EXPECT_TRUE(Sum(DType::kFloat32, 3000, 1, 1, 3).compare().ok()); }

// The bound of the header: n e M.
TEST(SumChecks, WhatIsBeyondTwiceTheBoundIsSeenAndItsBlockNamed) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const std::int64_t block = dtype == DType::kFloat32 ? 1024 : 64;
    const double epsilon = dtype == DType::kFloat32 ? 0x1p-23 : dtype == DType::kFloat16 ? 0x1p-10 : 0x1p-7;
    for (std::size_t at : {0u, 63u, 64u, 1023u, 1024u, 2999u}) {
      Sum sum(dtype, 3000, 7);
      const std::size_t check = 2 * (at / static_cast<std::size_t>(block));
      const double bound = kRanks * epsilon * static_cast<double>(sum.checks[check + 1]);
      const float before = load(sum.sums, dtype, at);
      // More than rounding to 16 bits can take away.
      store(sum.sums, dtype, at, before + static_cast<float>((dtype == DType::kFloat32 ? 2.01 : 2.5) * bound));
      const Status status = sum.compare();
      EXPECT_EQ(status.code(), StatusCode::kCorruptData) << dtype_name(dtype) << " " << at;
      const std::int64_t first = static_cast<std::int64_t>(at) / block * block;
      EXPECT_NE(status.message().find("values " + std::to_string(first) + " to "), std::string::npos)
          << status.message();
    }
  }
}

// What the header says of float32: some thousandths of one value.
TEST(SumChecks, AHundredthOfOneFloatIsSeen) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    Sum sum(DType::kFloat32, 4096, seed);
    store(sum.sums, DType::kFloat32, 100 * seed, load(sum.sums, DType::kFloat32, 100 * seed) + 0.01f);
    EXPECT_FALSE(sum.compare().ok()) << seed;
  }
}

TEST(SumChecks, InfAndNanOfARankAreItsOwn) {
  for (const float value : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    Sum sum(DType::kFloat32, 3000, 3);
    std::vector<float> sent(3000, 1.0f);
    sent[1500] = value;
    std::vector<float> own(sum.checks.size());
    write_sum_checks(sent.data(), DType::kFloat32, 3000, own.data());
    for (std::size_t c = 0; c < own.size(); ++c) sum.checks[c] += own[c];
    for (std::size_t i = 0; i < sent.size(); ++i)
      store(sum.sums, DType::kFloat32, i, load(sum.sums, DType::kFloat32, i) + sent[i]);
    EXPECT_TRUE(sum.compare().ok()) << sum.compare().to_string();
    // In a block where every rank was finite they are damage.
    store(sum.sums, DType::kFloat32, 2500, value);
    EXPECT_EQ(sum.compare().code(), StatusCode::kCorruptData);
  }
}

TEST(SumChecks, ASumThatOverflowsIsNoDamage) {
  const Sum sum(DType::kFloat16, 64, 3, 4e4f);
  int overflown = 0;
  for (std::size_t i = 0; i < 64; ++i) overflown += std::isinf(load(sum.sums, DType::kFloat16, i));
  ASSERT_GT(overflown, 0);
  EXPECT_TRUE(sum.compare().ok()) << sum.compare().to_string();
}

TEST(SumChecks, BytesAreCheckedExactly) {
  std::mt19937 random(5);
  for (const std::int64_t elems : {1, 100, 4096, 4097, 10000}) {
    std::vector<std::uint8_t> sums(static_cast<std::size_t>(elems)), sent(sums.size());
    std::vector<std::uint8_t> checks(static_cast<std::size_t>(sum_check_elems(DType::kUint8, elems))), own(checks);
    for (int rank = 0; rank < 5; ++rank) {
      for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += sent[i] = static_cast<std::uint8_t>(random());
      write_sum_checks(sent.data(), DType::kUint8, elems, own.data());
      for (std::size_t c = 0; c < checks.size(); ++c) checks[c] += own[c];
    }
    const auto compare = [&] { return compare_with_sum_checks(sums.data(), DType::kUint8, elems, checks.data(), 5); };
    EXPECT_TRUE(compare().ok());
    for (int times = 0; times < 50; ++times) {
      const std::size_t at = random() % sums.size();
      const auto bit = static_cast<std::uint8_t>(1u << random() % 8);
      sums[at] ^= bit;
      EXPECT_EQ(compare().code(), StatusCode::kCorruptData) << at;
      sums[at] ^= bit;
    }
    if (elems < 2) continue;
    for (std::size_t i = 0; i + 1 < sums.size(); i += 97) {  // the first weight alone would see no exchange
      if (sums[i] == sums[i + 1]) continue;
      std::swap(sums[i], sums[i + 1]);
      EXPECT_FALSE(compare().ok()) << i;
      std::swap(sums[i], sums[i + 1]);
    }
  }
}

}  // namespace
}  // namespace cortado
