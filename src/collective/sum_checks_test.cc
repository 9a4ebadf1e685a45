// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "collective/sum_checks.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "core/float16.h"

namespace cortado {
namespace {

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

enum class Order { kRanks, kRing, kTree };

// Contributions of all ranks, their sum rounded after every addition, and the checks summed in another order.
struct Sum {
  struct Setup {
    int ranks = 4;
    unsigned seed = 1;
    float scale = 1;
    Order order = Order::kRanks;
    bool is_mixed = false;  // magnitudes over twelve orders of magnitude
    int skipped_bytes = 0;
  };
  Sum(DType dtype, std::int64_t elems, const Setup& setup)
      : dtype(dtype), elems(elems), ranks(setup.ranks), sums(static_cast<std::size_t>(elems) * dtype_bytes(dtype)) {
    std::mt19937 random(setup.seed);
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> exponent(-6, 6);
    checks.resize(static_cast<std::size_t>(sum_check_elems(dtype, elems, ranks)));
    std::vector<std::vector<std::byte>> sent;
    for (int rank = 0; rank < ranks; ++rank) {
      std::vector<std::byte>& own = sent.emplace_back(sums.size());
      for (std::size_t i = 0; i < static_cast<std::size_t>(elems); ++i) {
        store(own, dtype, i, setup.scale * normal(random) * (setup.is_mixed ? std::pow(10.0f, exponent(random)) : 1));
      }
      std::vector<std::byte> moved(static_cast<std::size_t>(setup.skipped_bytes));
      moved.insert(moved.end(), own.begin(), own.end());
      std::vector<float> of_rank(checks.size());
      write_sum_checks(moved.data() + setup.skipped_bytes, dtype, elems, ranks, of_rank.data());
      for (std::size_t c = 0; c < checks.size(); ++c) checks[c] = of_rank[c] + checks[c];
    }
    for (std::size_t i = 0; i < static_cast<std::size_t>(elems); ++i) {
      // A ring begins with another rank in each part of a message.
      const std::size_t first = setup.order == Order::kRing ? i / 7 % sent.size() : 0;
      std::vector<std::byte> terms;
      for (std::size_t r = 0; r < sent.size(); ++r) {
        const std::byte* term = sent[(first + r) % sent.size()].data() + i * dtype_bytes(dtype);
        terms.insert(terms.end(), term, term + dtype_bytes(dtype));
      }
      for (std::size_t left = sent.size(); left > 1;) {
        const std::size_t half = left / 2;
        if (setup.order == Order::kTree) {
          for (std::size_t t = 0; t < half; ++t)
            store(terms, dtype, t, load(terms, dtype, t) + load(terms, dtype, left - 1 - t));
          left -= half;
        } else {
          store(terms, dtype, 0, load(terms, dtype, 0) + load(terms, dtype, sent.size() + 1 - left));
          --left;
        }
      }
      store(sums, dtype, i, load(terms, dtype, 0));
    }
  }
  Status compare() const { return compare_with_sum_checks(sums.data(), dtype, elems, checks.data(), ranks); }

  DType dtype;
  std::int64_t elems;
  int ranks;
  std::vector<std::byte> sums;
  std::vector<float> checks;
};

TEST(SumChecks, RoundingIsNoDamageInAnyOrder) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const std::int64_t elems : {0, 1, 2, 3, 17, 64, 65, 1024, 1025, 3000}) {
      for (const float scale : {1e-38f, 1e-6f, 1.0f, 1e3f}) {
        for (const Order order : {Order::kRanks, Order::kRing, Order::kTree}) {
          for (const int ranks : {1, 2, 5, 16}) {
            const bool is_mixed = ranks == 5 && dtype != DType::kFloat16;
            const Sum sum(dtype, elems,
                          {.ranks = ranks, .seed = 3, .scale = scale, .order = order, .is_mixed = is_mixed});
            EXPECT_TRUE(sum.compare().ok())
                << dtype_name(dtype) << " " << elems << ", scale " << scale << ", order " << static_cast<int>(order)
                << ", " << ranks << " ranks: " << sum.compare().to_string();
          }
        }
      }
    }
  }
}

TEST(SumChecks, ValuesNeedNoAlignment) { EXPECT_TRUE(Sum(DType::kFloat32, 3000, {.skipped_bytes = 3}).compare().ok()); }

// The bound of the header: (n + 1) e M.
TEST(SumChecks, WhatIsBeyondTwiceTheBoundIsSeenAndItsBlockNamed) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const std::int64_t block = dtype == DType::kFloat32 ? 1024 : 64;
    const double epsilon = dtype == DType::kFloat32 ? 0x1p-23 : dtype == DType::kFloat16 ? 0x1p-10 : 0x1p-7;
    for (std::size_t at : {0u, 63u, 64u, 1023u, 1024u, 2999u}) {
      Sum sum(dtype, 3000, {});
      const std::size_t check = 2 * (at / static_cast<std::size_t>(block));
      const double bound = (sum.ranks + 1) * epsilon * static_cast<double>(sum.checks[check + 1]);
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

// What the header's table says of float32, for contributions of magnitude 1.
TEST(SumChecks, SmallChangesOfOneFloatAreSeen) {
  for (const auto& [ranks, change] : {std::pair{4, 0.005f}, {8, 0.02f}, {64, 0.2f}}) {
    for (unsigned seed = 0; seed < 20; ++seed) {
      Sum sum(DType::kFloat32, 4096, {.ranks = ranks, .seed = seed});
      store(sum.sums, DType::kFloat32, 100 * seed, load(sum.sums, DType::kFloat32, 100 * seed) + change);
      EXPECT_FALSE(sum.compare().ok()) << ranks << " ranks, " << seed;
    }
  }
}

TEST(SumChecks, InfAndNanOfARankAreItsOwn) {
  for (const float value : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    Sum sum(DType::kFloat32, 3000, {});
    std::vector<float> sent(3000, 1.0f);
    sent[1500] = value;
    std::vector<float> own(sum.checks.size());
    write_sum_checks(sent.data(), DType::kFloat32, 3000, sum.ranks, own.data());
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
  const Sum sum(DType::kFloat16, 64, {.scale = 4e4f});
  int overflown = 0;
  for (std::size_t i = 0; i < 64; ++i) overflown += std::isinf(load(sum.sums, DType::kFloat16, i));
  ASSERT_GT(overflown, 0);
  EXPECT_TRUE(sum.compare().ok()) << sum.compare().to_string();
}

TEST(SumChecks, OneOrTwoChangedBytesAreSeen) {
  std::mt19937 random(5);
  for (const std::int64_t elems : {1, 100, 4096, 4097, 10000}) {
    std::vector<std::uint8_t> sums(static_cast<std::size_t>(elems)), sent(sums.size());
    std::vector<std::uint8_t> checks(static_cast<std::size_t>(sum_check_elems(DType::kUint8, elems, 5))), own(checks);
    for (int rank = 0; rank < 5; ++rank) {
      for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += sent[i] = static_cast<std::uint8_t>(random());
      write_sum_checks(sent.data(), DType::kUint8, elems, 5, own.data());
      for (std::size_t c = 0; c < checks.size(); ++c) checks[c] += own[c];
    }
    const auto compare = [&] { return compare_with_sum_checks(sums.data(), DType::kUint8, elems, checks.data(), 5); };
    EXPECT_TRUE(compare().ok());
    for (int times = 0; times < 300; ++times) {
      const std::vector<std::uint8_t> before = sums;
      const auto change = static_cast<std::uint8_t>(1u << random() % 8);
      const std::size_t at = random() % sums.size();
      sums[at] += change;
      EXPECT_EQ(compare().code(), StatusCode::kCorruptData) << at;
      const std::size_t other = random() % sums.size();
      if (other != at) {
        sums[other] -= change;  // the sum of all is as before
        EXPECT_EQ(compare().code(), StatusCode::kCorruptData) << at << " and " << other;
      }
      sums = before;
    }
  }
}

}  // namespace
}  // namespace cortado
