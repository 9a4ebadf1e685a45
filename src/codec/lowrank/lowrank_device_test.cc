// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The steps of low-rank training on an emulated device, against the kernels of the CPU.
#include <gtest/gtest.h>

#include <cmath>

#include "codec/lowrank/lowrank_batch_of.h"
#include "codec/lowrank/lowrank_reference.h"
#include "codec/lowrank/orthogonalise.h"
#include "core/device_emulation.h"

namespace cortado::lowrank_device_test {
namespace {

using reference::Floats;

constexpr std::uint64_t kSeed = 5, kStep = 6;

struct Shape {
  std::int64_t rows, cols;
  int rank;
};
// The last has more ranks than a pass keeps in registers, and more tiles of columns than a block walks over.
constexpr Shape kShapes[] = {{1, 1, 1},    {16, 256, 4}, {17, 257, 3}, {100, 2100, 4},
                             {300, 40, 9}, {70, 70, 1},  {35, 1300, 6}};

// A tensor with all that a step of training has.
struct Matrix {
  Matrix(const Shape& shape, DType dtype, std::uint64_t seed)
      : shape(shape),
        gradient(reference::random_floats(shape.rows * shape.cols, seed), dtype),
        residual(reference::random_floats(shape.rows * shape.cols, seed + 1)),
        sent_row(reference::random_floats(shape.rows * 2, seed + 2)),
        sent_col(reference::random_floats(shape.cols * 2, seed + 3)),
        row(reference::random_floats(shape.rows * shape.rank, seed + 4)),
        col(reference::random_floats(shape.cols * shape.rank, seed + 5)),
        output(static_cast<std::size_t>(shape.rows * shape.cols) * dtype_bytes(dtype)) {}

  LowRankTensor tensor(std::uint64_t number) {
    ResidualPass pass;
    pass.rows = shape.rows, pass.cols = shape.cols;
    pass.gradient = gradient.data();
    pass.gradient_dtype = gradient.dtype;
    pass.gradient_scale = 0.5f;
    pass.residual_in = residual.data();
    pass.residual_out = residual.data();
    pass.sent = {sent_row.data(), sent_col.data(), 2};
    return {.pass = pass,
            .rank = shape.rank,
            .row = row.data(),
            .col = col.data(),
            .output = output.data(),
            .number = number};
  }

  Shape shape;
  reference::Gradient gradient;
  Floats residual, sent_row, sent_col, row, col;
  std::vector<std::byte> output;
};

// The same tensors twice: for the batch, and for the kernels of the CPU.
class LowRankOnDevice : public testing::TestWithParam<DType> {
 protected:
  LowRankOnDevice() {
    for (const Shape& shape : kShapes) {
      matrices_.emplace_back(shape, GetParam(), 10 * matrices_.size());
      expected_.emplace_back(shape, GetParam(), 10 * expected_.size());
    }
  }

  std::vector<LowRankTensor> tensors() {
    std::vector<LowRankTensor> tensors;
    for (std::size_t i = 0; i < matrices_.size(); ++i) tensors.push_back(matrices_[i].tensor(i));
    return tensors;
  }

  void set_up() {
    batch_ = LowRankBatchOf<EmulatedDevice>::make(tensors()).value();
    workspace_.resize(batch_->workspace_bytes() / sizeof(Aligned));
    const Status status = set_up_with(tensors());
    ASSERT_TRUE(status.ok()) << status.to_string();
  }

  Status set_up_with(std::vector<LowRankTensor> tensors) {
    return batch_->set_up(tensors, {.seed = kSeed, .step = &step_}, reinterpret_cast<std::byte*>(workspace_.data()),
                          nullptr);
  }

  static BasisKey key(std::size_t i) { return {.seed = kSeed, .step = kStep, .tensor = i}; }

  static double distance(const Floats& a, const Floats& b) {
    double difference = 0, norm = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
      difference += std::pow(static_cast<double>(a[i]) - b[i], 2);
      norm += std::pow(static_cast<double>(b[i]), 2);
    }
    return std::sqrt(difference / (norm > 0 ? norm : 1));
  }

  struct alignas(256) Aligned {
    std::byte bytes[256];
  };

  const std::uint64_t step_ = kStep;
  std::vector<Matrix> matrices_, expected_;
  std::vector<Aligned> workspace_;
  std::unique_ptr<LowRankBatch> batch_;
};

INSTANTIATE_TEST_SUITE_P(Device, LowRankOnDevice, testing::Values(DType::kFloat32, DType::kBFloat16));

TEST_P(LowRankOnDevice, ProjectionsAreWithinTheBound) {
  for (const EmulatedOrder order : {EmulatedOrder::kForwards, EmulatedOrder::kBackwards}) {
    EmulatedDevice::order() = order;
    set_up();
    ASSERT_TRUE(batch_->project_rows(nullptr).ok());
    ASSERT_TRUE(batch_->project_cols(nullptr).ok());
    for (std::size_t i = 0; i < matrices_.size(); ++i) {
      SCOPED_TRACE(i);
      Matrix& expected = expected_[i];
      LowRankTensor tensor = expected.tensor(i);
      project_rows(tensor.pass, tensor.col, tensor.rank, tensor.row);
      EXPECT_LE(distance(matrices_[i].row, expected.row), 1e-5);
      // From the same basis.
      expected.row = matrices_[i].row;
      project_cols(tensor.pass, tensor.row, tensor.rank, tensor.col);
      EXPECT_LE(distance(matrices_[i].col, expected.col), 1e-5);
      EXPECT_LE(distance(matrices_[i].residual, expected.residual), 1e-6);
      EXPECT_EQ(batch_->faults()[i], 0u);
      expected.col = matrices_[i].col;
      expected.residual = matrices_[i].residual;
    }
  }
  EmulatedDevice::order() = EmulatedOrder::kForwards;
}

TEST_P(LowRankOnDevice, WhatIsNotFiniteMarksTheFactorAndStaysOutOfTheResidual) {
  matrices_[3].gradient.set(1234, INFINITY);
  const float before = matrices_[3].residual[1234];
  set_up();
  ASSERT_TRUE(batch_->project_cols(nullptr).ok());
  EXPECT_TRUE(std::isnan(matrices_[3].col[0]));
  EXPECT_EQ(matrices_[3].residual[1234], before);
  for (std::size_t i = 0; i < matrices_.size(); ++i) EXPECT_EQ(batch_->faults()[i] != 0, i == 3);
}

TEST_P(LowRankOnDevice, OrthogonalisationAndReconstructionGiveTheBytesOfTheCpu) {
  // A vector of zeros, one that depends on another, one that is not finite.
  for (std::vector<Matrix>* matrices : {&matrices_, &expected_}) {
    Matrix& matrix = (*matrices)[3];
    for (std::int64_t i = 0; i < matrix.shape.rows; ++i) {
      matrix.row[i * 4 + 1] = 0;
      matrix.row[i * 4 + 2] = 3 * matrix.row[i * 4];
      matrix.row[i * 4 + 3] = NAN;
    }
  }
  set_up();
  ASSERT_TRUE(batch_->orthogonalise_rows(nullptr).ok());
  ASSERT_TRUE(batch_->orthogonalise_cols(nullptr).ok());
  ASSERT_TRUE(batch_->reconstruct(0.25f, nullptr).ok());
  for (std::size_t i = 0; i < matrices_.size(); ++i) {
    SCOPED_TRACE(i);
    Matrix& m = expected_[i];
    const auto& [rows, cols, rank] = m.shape;
    Floats scratch(m.row.size());
    orthogonalise_rows(m.row.data(), rows, rank, key(i), scratch.data());
    orthogonalise(m.col.data(), cols, rank, key(i));
    reconstruct({m.row.data(), m.col.data(), rank}, rows, cols, 0.25f, m.output.data(), GetParam());
    EXPECT_TRUE(reference::same_bytes(matrices_[i].row, m.row));
    EXPECT_TRUE(reference::same_bytes(matrices_[i].col, m.col));
    EXPECT_TRUE(reference::same_bytes(matrices_[i].output, m.output));
  }
}

TEST_P(LowRankOnDevice, RandomBasesGiveTheBytesOfTheCpu) {
  set_up();
  ASSERT_TRUE(batch_->random_col_basis(nullptr).ok());
  for (std::size_t i = 0; i < matrices_.size(); ++i) {
    Matrix& m = expected_[i];
    random_basis(m.col.data(), m.shape.cols, m.shape.rank, key(i));
    EXPECT_TRUE(reference::same_bytes(matrices_[i].col, m.col)) << i;
  }
}

// Of hostile shapes and ranks too: before anything is sized by them.
TEST_P(LowRankOnDevice, RefusesWhatIsNoTensor) {
  const auto refused = [](LowRankTensor tensor, std::int64_t rows, std::int64_t cols, int rank) {
    tensor.pass.rows = rows, tensor.pass.cols = cols, tensor.rank = rank;
    return LowRankBatchOf<EmulatedDevice>::make({&tensor, 1}).status().code() == StatusCode::kInvalidArgument;
  };
  const LowRankTensor tensor = matrices_[1].tensor(0);
  const std::int64_t huge = std::int64_t{1} << 40;
  EXPECT_TRUE(refused(tensor, 16, 256, -1));
  EXPECT_TRUE(refused(tensor, 16, 256, 17));
  EXPECT_TRUE(refused(tensor, -16, 256, 0));
  EXPECT_TRUE(refused(tensor, huge, huge, 1));
  EXPECT_TRUE(refused(tensor, huge, huge / (1 << 20), 1 << 20));
  LowRankTensor codes = tensor;
  codes.pass.gradient_dtype = DType::kUint8;
  EXPECT_TRUE(refused(codes, 16, 256, 4));
}

TEST_P(LowRankOnDevice, RefusesOtherTensorsThanTheBatchWasMadeFor) {
  set_up();
  const auto refused = [&](auto change) {
    std::vector<LowRankTensor> changed = tensors();
    change(changed[1]);
    return set_up_with(changed).code() == StatusCode::kInvalidArgument;
  };
  EXPECT_FALSE(refused([](LowRankTensor& tensor) { tensor.pass.residual_in = nullptr; }));
  EXPECT_TRUE(refused([](LowRankTensor& tensor) { tensor.row = nullptr; }));
  EXPECT_TRUE(refused([](LowRankTensor& tensor) { tensor.col = nullptr; }));
  EXPECT_TRUE(refused([](LowRankTensor& tensor) { tensor.output = nullptr; }));
  EXPECT_TRUE(refused([](LowRankTensor& tensor) { tensor.pass.sent.row = nullptr; }));
  EXPECT_TRUE(refused([](LowRankTensor& tensor) { tensor.rank = 3; }));
  EXPECT_TRUE(refused([](LowRankTensor& tensor) { tensor.pass.gradient_dtype = DType::kFloat16; }));
  EXPECT_TRUE(refused([](LowRankTensor& tensor) {
    tensor.row = reinterpret_cast<float*>(reinterpret_cast<std::byte*>(tensor.row) + 1);
  }));
  EXPECT_FALSE(batch_
                   ->set_up(tensors(), {.seed = kSeed, .step = &step_},
                            reinterpret_cast<std::byte*>(workspace_.data()) + 16, nullptr)
                   .ok());
}

}  // namespace
}  // namespace cortado::lowrank_device_test
