// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/lowrank/orthogonalise.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>

#include "codec/lowrank/lowrank_reference.h"
#include "core/simd_target.h"

namespace cortado {
namespace {

using reference::Floats;
using reference::random_floats;
using reference::same_bytes;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr BasisKey kKey{.seed = 11, .step = 22, .tensor = 33};

double dot(const Floats& vectors, std::int64_t length, int a, int b) {
  double sum = 0;
  for (std::int64_t i = 0; i < length; ++i) {
    sum += static_cast<double>(vectors[a * length + i]) * vectors[b * length + i];
  }
  return sum;
}

// The first min(rank, length) vectors are orthonormal, what is beyond is zero.
void expect_orthonormal(const Floats& vectors, std::int64_t length, int rank) {
  const int full = static_cast<int>(std::min<std::int64_t>(rank, length));
  double worst = 0;
  for (int a = 0; a < rank; ++a) {
    for (int b = 0; b <= a; ++b) {
      const double expected = a == b && a < full ? 1 : 0;
      const double error = std::fabs(dot(vectors, length, a, b) - expected);
      worst = error <= worst ? worst : error;  // NaN counts as worse
    }
  }
  EXPECT_LE(worst, 1e-5);
}

Floats orthogonalised(Floats vectors, std::int64_t length, int rank, const BasisKey& key = kKey) {
  orthogonalise(vectors.data(), length, rank, key);
  return vectors;
}

struct Case {
  std::int64_t length;
  int rank;
};
const Case kCases[] = {{1, 1},     {2, 1},     {5, 2},    {15, 3}, {16, 4},  {17, 5}, {33, 33}, {100, 6}, {511, 7},
                       {1000, 16}, {4096, 33}, {257, 64}, {3, 3},  {64, 64}, {1, 4},  {3, 5},   {16, 33}, {30'528, 4}};

std::string describe(const Case& c) { return std::to_string(c.rank) + " of length " + std::to_string(c.length); }

TEST(Orthogonalise, GivesAnOrthonormalBasis) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(describe(c));
    expect_orthonormal(orthogonalised(random_floats(c.rank * c.length, 1), c.length, c.rank), c.length, c.rank);
  }
}

// Each vector is the earlier ones' combination: the basis spans what the input spans.
TEST(Orthogonalise, KeepsTheSpan) {
  constexpr std::int64_t kLength = 200;
  constexpr int kRank = 6;
  const Floats input = random_floats(kRank * kLength, 2);
  const Floats basis = orthogonalised(input, kLength, kRank);
  for (int k = 0; k < kRank; ++k) {
    reference::Doubles rest(input.begin() + k * kLength, input.begin() + (k + 1) * kLength);
    const double before = reference::sum_squares(rest);
    for (int j = 0; j <= k; ++j) {
      double along = 0;
      for (std::int64_t i = 0; i < kLength; ++i) along += rest[i] * basis[j * kLength + i];
      for (std::int64_t i = 0; i < kLength; ++i) rest[i] -= along * basis[j * kLength + i];
    }
    EXPECT_LE(std::sqrt(reference::sum_squares(rest) / before), 1e-5) << "vector " << k;
  }
}

TEST(Orthogonalise, GivesTheSameBytesOnEveryTarget) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(describe(c));
    Floats input = random_floats(c.rank * c.length, 3);
    if (c.rank > 2) std::copy_n(input.begin(), c.length, input.begin() + 2 * c.length);  // one replaced vector
    const Floats expected = orthogonalised(input, c.length, c.rank);
    for (const std::int64_t target : simd_targets()) {
      const ForcedSimdTarget forced(target);
      ASSERT_EQ(simd_target(), target);
      EXPECT_TRUE(same_bytes(orthogonalised(input, c.length, c.rank), expected)) << simd_target_name(target);
    }
  }
}

TEST(Orthogonalise, SurvivesAnyInput) {
  constexpr std::int64_t kLength = 37;
  constexpr int kRank = 5;
  const Floats normal = random_floats(kRank * kLength, 4);
  const auto scaled = [&](float scale) {
    Floats input = normal;
    for (float& value : input) value *= scale;
    return input;
  };
  const auto with = [&](int vector, float value) {
    Floats input = normal;
    input[vector * kLength + 7] = value;
    return input;
  };
  const auto all_like_first = [&](float noise) {
    Floats input = normal;
    for (int k = 1; k < kRank; ++k) {
      for (std::int64_t i = 0; i < kLength; ++i) input[k * kLength + i] = normal[i] + noise * normal[k * kLength + i];
    }
    return input;
  };
  Floats mixed = normal;  // magnitudes from denormal to nearly the largest
  for (std::size_t i = 0; i < mixed.size(); ++i) mixed[i] = std::ldexp(mixed[i], static_cast<int>(i % 250) - 125);
  const struct {
    const char* name;
    Floats input;
  } inputs[] = {{"zeros", Floats(kRank * kLength)},
                {"equal vectors", all_like_first(0)},
                {"nearly equal vectors", all_like_first(1e-3f)},
                {"equal but for rounding", all_like_first(1e-7f)},
                {"all ones", Floats(kRank * kLength, 1.0f)},
                {"tiny", scaled(1e-38f)},
                {"denormal", scaled(1e-44f)},
                {"huge", scaled(1e30f)},
                {"near the largest", scaled(9e37f)},
                {"mixed magnitudes", mixed},
                {"NaN in the first vector", with(0, kNan)},
                {"NaN in the last vector", with(kRank - 1, kNan)},
                {"infinity", with(2, -kInfinity)},
                {"NaN everywhere", Floats(kRank * kLength, kNan)},
                {"one huge element", with(1, 3e38f)}};
  for (const auto& [name, input] : inputs) {
    SCOPED_TRACE(name);
    const Floats basis = orthogonalised(input, kLength, kRank);
    expect_orthonormal(basis, kLength, kRank);
    for (const std::int64_t target : simd_targets()) {
      const ForcedSimdTarget forced(target);
      EXPECT_TRUE(same_bytes(orthogonalised(input, kLength, kRank), basis)) << simd_target_name(target);
    }
  }
}

TEST(Orthogonalise, DoesNotDependOnThePowerOfTwoOfTheScale) {
  const Floats input = random_floats(5 * 100, 5);
  Floats scaled = input;
  for (float& value : scaled) value *= 0x1p60f;
  EXPECT_TRUE(same_bytes(orthogonalised(input, 100, 5), orthogonalised(scaled, 100, 5)));
}

// Replacements are drawn by key and index, so that all ranks draw the same ones, and others in the next step.
TEST(Orthogonalise, ReplacesDependentVectorsByKey) {
  const Floats zeros(3 * 50);
  const Floats basis = orthogonalised(zeros, 50, 3);
  EXPECT_TRUE(same_bytes(basis, orthogonalised(zeros, 50, 3)));
  for (const BasisKey& other : {BasisKey{12, 22, 33}, BasisKey{11, 23, 33}, BasisKey{11, 22, 34}}) {
    EXPECT_FALSE(same_bytes(basis, orthogonalised(zeros, 50, 3, other)));
  }
  Floats independent = random_floats(3 * 50, 6);
  EXPECT_TRUE(same_bytes(orthogonalised(independent, 50, 3), orthogonalised(independent, 50, 3, {1, 2, 3})))
      << "a full basis does not look at the key";
}

TEST(OrthogonaliseRows, EqualsTheTransposed) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(describe(c));
    const Floats vectors = random_floats(c.rank * c.length, 7);
    Floats rows = reference::transposed(vectors, c.rank, c.length);
    Floats scratch(rows.size());
    orthogonalise_rows(rows.data(), c.length, c.rank, kKey, scratch.data());
    EXPECT_TRUE(same_bytes(reference::transposed(rows, c.length, c.rank), orthogonalised(vectors, c.length, c.rank)));
  }
}

TEST(RemoveOverlap, IsNearFloat64AndTheSameBytesOnEveryTarget) {
  constexpr std::int64_t kRows = 41, kCols = 23;
  constexpr int kRank = 3;
  const Floats row_factor = random_floats(kRows * kRank, 1), row_basis = random_floats(kRows * kRank, 2);
  const Floats col_factor = random_floats(kRank * kCols, 3), col_basis = random_floats(kRank * kCols, 4);
  const TwoSided shape{kRows, kCols, kRank, row_basis.data(), col_basis.data()};
  const auto removed = [&] {
    Floats result = col_factor, scratch(2 * kRows * kRank);
    remove_overlap(shape, row_factor.data(), result.data(), scratch.data());
    return result;
  };
  const Floats result = removed();
  // col_factor - (row_basis^T row_factor) col_basis
  const Floats row_basis_t = reference::transposed(row_basis, kRows, kRank);
  const auto overlap = reference::product(row_basis_t, row_factor, kRank, kRows, kRank);
  reference::Doubles expected = reference::product(overlap, col_basis, kRank, kRank, kCols);
  for (std::size_t i = 0; i < expected.size(); ++i) expected[i] = col_factor[i] - expected[i];
  EXPECT_LE(reference::relative_error(result, expected), 1e-5);
  for (const std::int64_t target : simd_targets()) {
    const ForcedSimdTarget forced(target);
    EXPECT_TRUE(same_bytes(removed(), result)) << simd_target_name(target);
  }
}

TEST(RandomBasis, IsOrthonormalAndKeyed) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(describe(c));
    Floats basis(c.rank * c.length), again(c.rank * c.length);
    random_basis(basis.data(), c.length, c.rank, kKey);
    expect_orthonormal(basis, c.length, c.rank);
    for (const std::int64_t target : simd_targets()) {
      const ForcedSimdTarget forced(target);
      random_basis(again.data(), c.length, c.rank, kKey);
      EXPECT_TRUE(same_bytes(again, basis)) << simd_target_name(target);
    }
    if (c.length == 1) continue;  // 1 or -1
    for (const BasisKey& other : {BasisKey{12, 22, 33}, BasisKey{11, 23, 33}, BasisKey{11, 22, 34}}) {
      random_basis(again.data(), c.length, c.rank, other);
      EXPECT_FALSE(same_bytes(again, basis));
    }
  }
}

// The first vectors do not depend on how many there are.
TEST(RandomBasis, GrowsWithTheRank) {
  Floats small(3 * 40), large(8 * 40);
  random_basis(small.data(), 40, 3, kKey);
  random_basis(large.data(), 40, 8, kKey);
  large.resize(small.size());
  EXPECT_TRUE(same_bytes(small, large));
}

}  // namespace
}  // namespace cortado
