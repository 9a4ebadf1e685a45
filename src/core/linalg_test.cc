// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/linalg.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "core/philox.h"

namespace cortado {
namespace {

std::vector<float> normal(std::int64_t elems, std::uint64_t seed) {
  std::vector<float> values(static_cast<std::size_t>(elems));
  philox_fill_normal(seed, 0, 0, values.data(), elems);
  return values;
}

// Element (i, j) of op(x), x with rows of `stride` elements.
double at(const std::vector<float>& x, std::int64_t stride, Operand op, std::int64_t i, std::int64_t j) {
  return x[static_cast<std::size_t>(op == Operand::kAsIs ? i * stride + j : j * stride + i)];
}

TEST(Linalg, ProductsOfAllTranspositions) {
  constexpr std::int64_t kM = 3, kN = 5, kK = 7;
  const std::vector<float> a = normal(kM * kK, 1), b = normal(kK * kN, 2);
  for (const Operand op_a : {Operand::kAsIs, Operand::kTransposed}) {
    for (const Operand op_b : {Operand::kAsIs, Operand::kTransposed}) {
      std::vector<float> c(kM * kN, std::numeric_limits<float>::quiet_NaN());
      multiply(op_a, op_b, kM, kN, kK, a.data(), b.data(), c.data());
      for (std::int64_t i = 0; i < kM; ++i) {
        for (std::int64_t j = 0; j < kN; ++j) {
          double sum = 0;
          for (std::int64_t k = 0; k < kK; ++k) {
            sum += at(a, op_a == Operand::kAsIs ? kK : kM, op_a, i, k) *
                   at(b, op_b == Operand::kAsIs ? kN : kK, op_b, k, j);
          }
          EXPECT_NEAR(c[static_cast<std::size_t>(i * kN + j)], sum, 1e-5);
        }
      }
    }
  }
}

TEST(Linalg, ProductsOfPairsAreAddedToTheLowerTriangleOnly) {
  constexpr std::int64_t kN = 4, kK = 9, kStride = 6;
  const std::vector<float> x = normal(kN * kK, 3);
  for (const bool is_rows : {true, false}) {
    std::vector<float> c(kN * kStride, 100);
    (is_rows ? add_row_products : add_column_products)(kN, kK, 0.5f, x.data(), c.data(), kStride);
    for (std::int64_t i = 0; i < kN; ++i) {
      for (std::int64_t j = 0; j < kStride; ++j) {
        double expected = 100;
        for (std::int64_t k = 0; k < kK && j <= i; ++k) {
          const Operand op = is_rows ? Operand::kAsIs : Operand::kTransposed;
          expected += 0.5 * at(x, is_rows ? kK : kN, op, i, k) * at(x, is_rows ? kK : kN, op, j, k);
        }
        EXPECT_NEAR(c[static_cast<std::size_t>(i * kStride + j)], expected, 1e-4);
      }
    }
  }
}

TEST(Linalg, EigenvectorsAreRowsThatGiveTheMatrixBack) {
  for (const std::int64_t n : {1, 2, 7, 64, 100}) {
    std::vector<float> x = normal(n * n, 4), matrix(x.size()), values(static_cast<std::size_t>(n));
    add_row_products(n, n, 1.0f / static_cast<float>(n), x.data(), matrix.data(), n);
    std::vector<float> vectors = matrix;
    for (std::int64_t i = 0; i < n; ++i) {  // above the diagonal nothing is read
      for (std::int64_t j = i + 1; j < n; ++j) vectors[static_cast<std::size_t>(i * n + j)] = 1e30f;
    }
    std::vector<std::byte> scratch(eigen_scratch_bytes(n));
    ASSERT_TRUE(symmetric_eigen(n, vectors.data(), values.data(), scratch).ok());
    for (std::int64_t i = 0; i < n; ++i) {
      EXPECT_LE(values[static_cast<std::size_t>(std::max<std::int64_t>(i - 1, 0))],
                values[static_cast<std::size_t>(i)]);
      for (std::int64_t j = 0; j <= i; ++j) {
        double sum = 0;
        for (std::int64_t k = 0; k < n; ++k) {
          sum += at(vectors, n, Operand::kAsIs, k, i) * values[static_cast<std::size_t>(k)] *
                 at(vectors, n, Operand::kAsIs, k, j);
        }
        EXPECT_NEAR(sum, matrix[static_cast<std::size_t>(i * n + j)], 1e-4) << n;
      }
    }
  }
}

TEST(Linalg, InverseOfAPositiveDefiniteMatrix) {
  constexpr std::int64_t kN = 20;
  const std::vector<float> x = normal(kN * kN, 5);
  std::vector<float> matrix(kN * kN);
  add_row_products(kN, kN, 1.0f / kN, x.data(), matrix.data(), kN);
  for (std::int64_t i = 0; i < kN; ++i) matrix[static_cast<std::size_t>(i * kN + i)] += 0.1f;
  std::vector<float> inverse = matrix;
  ASSERT_TRUE(invert_positive_definite(kN, inverse.data()).ok());
  const auto element = [](const std::vector<float>& m, std::int64_t i, std::int64_t j) {
    return static_cast<double>(m[static_cast<std::size_t>(std::max(i, j) * kN + std::min(i, j))]);
  };
  for (std::int64_t i = 0; i < kN; ++i) {
    for (std::int64_t j = 0; j < kN; ++j) {
      double sum = 0;
      for (std::int64_t k = 0; k < kN; ++k) sum += element(matrix, i, k) * element(inverse, k, j);
      EXPECT_NEAR(sum, i == j ? 1 : 0, 1e-4);
    }
  }
}

TEST(Linalg, AnIndefiniteMatrixIsAnError) {
  std::vector<float> matrix = {1, 0, 2, 1};
  const Status status = invert_positive_definite(2, matrix.data());
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(status.message().find("2 x 2 matrix is not positive definite (pivot 2)"), std::string::npos);
}

TEST(Linalg, NothingAtAll) {
  std::vector<std::byte> scratch(eigen_scratch_bytes(0));
  EXPECT_TRUE(symmetric_eigen(0, nullptr, nullptr, scratch).ok());
  EXPECT_TRUE(invert_positive_definite(0, nullptr).ok());
  float c = 3;
  multiply(Operand::kAsIs, Operand::kAsIs, 1, 1, 0, &c, &c, &c);
  EXPECT_EQ(c, 0);  // an empty sum
}

}  // namespace
}  // namespace cortado
