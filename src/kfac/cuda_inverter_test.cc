// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Inverses of a CUDA device against those of the CPU. Eigenvectors have no sign, and no direction where eigenvalues are
// equal: compared is what they are the decomposition of.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <vector>

#include "core/cuda_device.h"
#include "core/linalg.h"
#include "core/philox.h"
#include "cortado/kfac_cuda.h"
#include "kfac/inverter.h"
#include "kfac/triangle.h"

namespace cortado {
namespace {

using Floats = std::vector<float>;

// X X^T / (2 n) of normal X, n x 2 n: positive definite, its eigenvalues some tenths apart.
Floats factor(std::int64_t n, std::uint64_t number) {
  Floats x(static_cast<std::size_t>(2 * n * n)), matrix(static_cast<std::size_t>(n * n));
  philox_fill_normal(5, 0, number, x.data(), 2 * n * n);
  add_row_products(n, 2 * n, 1.0f / static_cast<float>(2 * n), x.data(), matrix.data(), n);
  Floats triangle(static_cast<std::size_t>(triangle_elems(n)));
  copy_to_triangle(n, matrix.data(), triangle.data());
  return triangle;
}

struct Matrices {
  explicit Matrices(const std::vector<std::int64_t>& sizes, bool is_eigen) {
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      const std::int64_t n = sizes[i];
      triangles.push_back(factor(n, i));
      inverses.emplace_back(static_cast<std::size_t>(n * n), -1.0f);
      values.emplace_back(static_cast<std::size_t>(n), -1.0f);
    }
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      jobs.push_back({.n = sizes[i],
                      .triangle = triangles[i].data(),
                      .inverse = inverses[i].data(),
                      .values = is_eigen ? values[i].data() : nullptr,
                      .damping = is_eigen ? 0 : 1e-3 * static_cast<double>(i + 1)});
    }
  }
  std::vector<Floats> triangles, inverses, values;
  std::vector<InverseJob> jobs;
};

double distance(const Floats& found, const Floats& expected) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    difference += std::pow(static_cast<double>(found[i]) - static_cast<double>(expected[i]), 2);
    norm += std::pow(static_cast<double>(expected[i]), 2);
  }
  return std::sqrt(difference / (norm > 0 ? norm : 1));
}

// vectors^T diag(values) vectors.
Floats product(const Floats& vectors, const Floats& values) {
  const auto n = static_cast<std::int64_t>(values.size());
  Floats scaled = vectors, matrix(vectors.size());
  for (std::size_t i = 0; i < scaled.size(); ++i) scaled[i] *= values[i / values.size()];
  multiply(Operand::kTransposed, Operand::kAsIs, n, n, n, vectors.data(), scaled.data(), matrix.data());
  return matrix;
}

constexpr std::chrono::seconds kTimeout{100};

// Several of a size are inverted together up to 512 rows.
const std::vector<std::int64_t> kSizes = {1, 65, 2, 64, 65, 130, 1, 65, 300, 257, 512, 513, 257, 512, 513};

class CudaInverterTest : public testing::Test {
 protected:
  void SetUp() override {
    Result<std::shared_ptr<KfacInverter>> made = make_cuda_inverter();
    ASSERT_TRUE(made.ok()) << made.status().to_string();
    device_ = std::move(made).value();
  }
  std::shared_ptr<KfacInverter> device_;
  std::unique_ptr<KfacInverter> host_ = make_cpu_inverter(1);
};

TEST_F(CudaInverterTest, EigenvectorsDecomposeTheFactor) {
  Matrices found(kSizes, true), expected(kSizes, true);
  for (int run = 0; run < 2; ++run) {
    ASSERT_TRUE(device_->invert(found.jobs, kTimeout).ok());
    ASSERT_TRUE(host_->invert(expected.jobs, kTimeout).ok());
    for (std::size_t i = 0; i < kSizes.size(); ++i) {
      SCOPED_TRACE(i);
      EXPECT_FALSE(found.jobs[i].failed);
      EXPECT_FALSE(found.jobs[i].is_indefinite);
      EXPECT_LE(distance(found.values[i], expected.values[i]), 1e-5);
      const Floats matrix = product(found.inverses[i], found.values[i]);
      EXPECT_LE(distance(matrix, product(expected.inverses[i], expected.values[i])), 1e-5);
      const Floats ones(found.values[i].size(), 1.0f);
      EXPECT_LE(distance(product(found.inverses[i], ones), product(expected.inverses[i], ones)), 1e-4);
    }
  }
}

// So that a first inverse does not find the device full.
TEST_F(CudaInverterTest, NothingIsAllocatedForWhatWasReserved) {
  for (const bool is_eigen : {true, false}) {
    Matrices found(kSizes, is_eigen);
    ASSERT_TRUE(device_->reserve(found.jobs).ok());
    const std::int64_t bytes = device_->scratch_bytes();
    EXPECT_GT(bytes, 0);
    ASSERT_TRUE(device_->invert(found.jobs, kTimeout).ok());
    for (const std::size_t i : {std::size_t{3}, std::size_t{4}}) found.triangles[i][0] -= 5;  // some are inverted again
    ASSERT_TRUE(device_->invert(found.jobs, kTimeout).ok());
    EXPECT_EQ(found.jobs[4].raised > 0, !is_eigen);
    EXPECT_EQ(device_->scratch_bytes(), bytes);
  }
}

// Of inverses: cuSOLVER waits for eigenvectors itself.
TEST_F(CudaInverterTest, ADeviceThatIsLateIsAnErrorForGood) {
  Matrices found({2048}, false);
  for (int run = 0; run < 2; ++run) {
    const Status status = device_->invert(found.jobs, std::chrono::nanoseconds(0));
    EXPECT_EQ(status.code(), StatusCode::kTimeout) << status.to_string();
  }
}

TEST_F(CudaInverterTest, DampedInversesAreThoseOfTheCpu) {
  Matrices found(kSizes, false), expected(kSizes, false);
  for (int run = 0; run < 2; ++run) {
    ASSERT_TRUE(device_->invert(found.jobs, kTimeout).ok());
    ASSERT_TRUE(host_->invert(expected.jobs, kTimeout).ok());
    for (std::size_t i = 0; i < kSizes.size(); ++i) {
      SCOPED_TRACE(i);
      EXPECT_FALSE(found.jobs[i].failed);
      EXPECT_EQ(found.jobs[i].raised, 0);
      EXPECT_LE(distance(found.inverses[i], expected.inverses[i]), 1e-3);
      for (std::int64_t r = 0, n = kSizes[i]; r < n; ++r) {
        for (std::int64_t c = 0; c < r; ++c) {
          ASSERT_EQ(found.inverses[i][static_cast<std::size_t>(r * n + c)],
                    found.inverses[i][static_cast<std::size_t>(c * n + r)]);
        }
      }
    }
  }
}

TEST_F(CudaInverterTest, DampingIsRaisedAsOnTheCpu) {
  Matrices found(kSizes, false), expected(kSizes, false);
  for (Matrices* each : {&found, &expected}) {
    each->triangles[3][0] -= 5;  // indefinite: damping must come to more than that
    each->triangles[4][0] -= 5;  // of three of a size, which are inverted together
    each->triangles[8][0] -= 50;
  }
  ASSERT_TRUE(device_->invert(found.jobs, kTimeout).ok());
  ASSERT_TRUE(host_->invert(expected.jobs, kTimeout).ok());
  for (std::size_t i = 0; i < kSizes.size(); ++i) {
    SCOPED_TRACE(i);
    EXPECT_EQ(found.jobs[i].raised, expected.jobs[i].raised);
    EXPECT_EQ(found.jobs[i].failed, expected.jobs[i].failed);
    EXPECT_LE(distance(found.inverses[i], expected.inverses[i]), 1e-3);
  }
  EXPECT_GT(found.jobs[3].raised, 0);
  EXPECT_GT(found.jobs[4].raised, 0);
  EXPECT_EQ(found.jobs[1].raised, 0);
}

TEST_F(CudaInverterTest, IndefiniteFactorsAreReported) {
  Matrices found({64, 64}, true), expected({64, 64}, true);
  found.triangles[1][0] -= 5, expected.triangles[1][0] -= 5;
  ASSERT_TRUE(device_->invert(found.jobs, kTimeout).ok());
  ASSERT_TRUE(host_->invert(expected.jobs, kTimeout).ok());
  EXPECT_FALSE(found.jobs[0].is_indefinite);
  EXPECT_TRUE(found.jobs[1].is_indefinite);
  EXPECT_EQ(found.values[1][0], 0.0f);
  EXPECT_LE(distance(found.values[1], expected.values[1]), 1e-5);
}

}  // namespace
}  // namespace cortado

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (!testing::GTEST_FLAG(list_tests) && cortado::cuda_device_count() == 0) {
    std::puts("no CUDA device: none of the K-FAC tests was run");
    return 0;
  }
  return RUN_ALL_TESTS();
}
