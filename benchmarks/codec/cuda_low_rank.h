// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The matrices of a model on a CUDA device with all that ACP-SGD needs of them, and its steps: in one the row factors
// are sent, in the next the column factors. The collective between projection and reconstruction is left out, as with
// one rank.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "benchmarks/codec/cuda_bench.h"
#include "codec/lowrank/lowrank_batch.h"
#include "codec/lowrank/orthogonalise.h"
#include "core/philox.h"

namespace cortado {

struct MatrixShape {
  std::int64_t rows, cols;
};

class LowRankModel {
 public:
  LowRankModel(std::vector<MatrixShape> shapes, int rank, cudaStream_t stream)
      : shapes_(std::move(shapes)),
        rank_(rank),
        stream_(stream),
        elems_(total(1, [](const MatrixShape& s) { return s.rows * s.cols; })),
        row_elems_(total(rank, [](const MatrixShape& s) { return s.rows; })),
        col_elems_(total(rank, [](const MatrixShape& s) { return s.cols; })),
        gradients_(4 * elems_),
        residuals_(4 * elems_),
        outputs_(4 * elems_),
        factors_(4 * (row_elems_ + col_elems_)),
        sent_(4 * (row_elems_ + col_elems_)),
        step_(8) {
    place();
    batch_ = make_cuda_low_rank_batch(tensors_).value();
    workspace_ = std::make_unique<DeviceMemory>(batch_->workspace_bytes());
    require(batch_->set_up(tensors_, {.seed = kSeed, .step = step_.get<std::uint64_t>()}, workspace_->get(), stream_));
    require(batch_->random_col_basis(stream_));
  }

  std::uint64_t elems() const { return elems_; }
  std::uint64_t factor_elems() const { return row_elems_ + col_elems_; }

  // What a step is made of.
  void orthogonalise_cols() { require(batch_->orthogonalise_cols(stream_)); }
  void orthogonalise_rows() { require(batch_->orthogonalise_rows(stream_)); }
  void project_rows() { require(batch_->project_rows(stream_)); }
  void project_cols() { require(batch_->project_cols(stream_)); }
  void reconstruct() { require(batch_->reconstruct(1, stream_)); }
  // The rank's own pair, which the next pass subtracts, before the collective overwrites it.
  void keep_sent() {
    require(cudaMemcpyAsync(sent_.get(), factors_.get(), 4 * factor_elems(), cudaMemcpyDeviceToDevice, stream_),
            "pair");
  }

  void send_rows() {
    orthogonalise_cols();
    project_rows();
    keep_sent();
    reconstruct();
  }
  void send_cols() {
    orthogonalise_rows();
    project_cols();
    keep_sent();
    reconstruct();
  }

  // Before anything else: takes two steps and compares matrix i with the kernels of the CPU. Projections are held to
  // the bound of the codec's spec.md, everything else to bytes.
  void check(std::size_t i) {
    const MatrixShape& shape = shapes_[i];
    const std::vector<float> gradient = gradient_of(i);
    std::vector<float> residual(gradient.size()), output(gradient.size());
    std::vector<float> col(static_cast<std::size_t>(shape.cols * rank_)),
        row(static_cast<std::size_t>(shape.rows * rank_));
    std::vector<float> sent_row(row.size()), sent_col(col.size()), scratch(row.size());
    const BasisKey key = {.seed = kSeed, .step = 0, .tensor = i};
    ResidualPass pass;
    pass.rows = shape.rows, pass.cols = shape.cols;
    pass.gradient = gradient.data();
    pass.residual_in = pass.residual_out = residual.data();
    pass.sent = {sent_row.data(), sent_col.data(), rank_};
    random_basis(col.data(), shape.cols, rank_, key);
    same("random basis", i, tensors_[i].col, col);

    send_rows();
    orthogonalise(col.data(), shape.cols, rank_, key);
    same("orthogonalised columns", i, tensors_[i].col, col);
    cortado::project_rows(pass, col.data(), rank_, row.data());
    near("row factor", i, tensors_[i].row, &row);
    cortado::reconstruct({row.data(), col.data(), rank_}, shape.rows, shape.cols, 1, output.data(), DType::kFloat32);
    same("reconstruction", i, tensors_[i].output, output);
    sent_row = row, sent_col = col;

    send_cols();
    cortado::orthogonalise_rows(row.data(), shape.rows, rank_, key, scratch.data());
    same("orthogonalised rows", i, tensors_[i].row, row);
    cortado::project_cols(pass, row.data(), rank_, col.data());
    near("column factor", i, tensors_[i].col, &col);
    cortado::reconstruct({row.data(), col.data(), rank_}, shape.rows, shape.cols, 1, output.data(), DType::kFloat32);
    same("reconstruction", i, tensors_[i].output, output);
  }

 private:
  static constexpr std::uint64_t kSeed = 7;
  static constexpr double kBound = 1e-5;

  template <class Elems>
  std::uint64_t total(int factor, const Elems& elems) const {
    std::int64_t sum = 0;
    for (const MatrixShape& shape : shapes_) sum += factor * elems(shape);
    return static_cast<std::uint64_t>(sum);
  }

  std::vector<float> gradient_of(std::size_t i) const {
    const std::int64_t elems = shapes_[i].rows * shapes_[i].cols;
    std::vector<float> values(static_cast<std::size_t>(elems));
    philox_fill_normal(kSeed, 0, 1000 + i, values.data(), elems);
    return values;
  }

  void place() {
    require(cudaMemset(residuals_.get(), 0, 4 * elems_), "residuals");
    require(cudaMemset(factors_.get(), 0, 4 * factor_elems()), "factors");
    require(cudaMemset(sent_.get(), 0, 4 * factor_elems()), "sent");
    require(cudaMemset(step_.get(), 0, 8), "step");
    std::int64_t at = 0, row_at = 0, col_at = static_cast<std::int64_t>(row_elems_);
    for (std::size_t i = 0; i < shapes_.size(); ++i) {
      const MatrixShape& shape = shapes_[i];
      LowRankTensor tensor;
      tensor.pass.rows = shape.rows, tensor.pass.cols = shape.cols;
      to_device(gradients_.get<float>() + at, gradient_of(i));
      tensor.pass.gradient = gradients_.get<float>() + at;
      tensor.pass.residual_in = tensor.pass.residual_out = residuals_.get<float>() + at;
      tensor.pass.sent = {sent_.get<float>() + row_at, sent_.get<float>() + col_at, rank_};
      tensor.rank = rank_;
      tensor.row = factors_.get<float>() + row_at;
      tensor.col = factors_.get<float>() + col_at;
      tensor.output = outputs_.get<float>() + at;
      tensor.number = i;
      tensors_.push_back(tensor);
      at += shape.rows * shape.cols, row_at += shape.rows * rank_, col_at += shape.cols * rank_;
    }
  }

  void same(const char* what, std::size_t i, const void* found, const std::vector<float>& expected) const {
    require(cudaStreamSynchronize(stream_), what);
    const std::vector<float> values = from_device<float>(found, expected.size());
    require(std::memcmp(values.data(), expected.data(), expected.size() * sizeof(float)) == 0,
            "matrix " + std::to_string(i) + ": the device's " + what + " has other bytes than the CPU's");
  }
  // What follows is computed from the device's values.
  void near(const char* what, std::size_t i, const void* found, std::vector<float>* expected) const {
    require(cudaStreamSynchronize(stream_), what);
    std::vector<float> values = from_device<float>(found, expected->size());
    const double distance = relative_distance(values, *expected);
    require(distance <= kBound, "matrix " + std::to_string(i) + ": the device's " + what + " is " +
                                    std::to_string(distance) + " from the CPU's, expected at most 1e-5");
    *expected = std::move(values);
  }

  const std::vector<MatrixShape> shapes_;
  const int rank_;
  const cudaStream_t stream_;
  const std::uint64_t elems_, row_elems_, col_elems_;
  const DeviceMemory gradients_, residuals_, outputs_, factors_, sent_, step_;
  std::vector<LowRankTensor> tensors_;
  std::unique_ptr<LowRankBatch> batch_;
  std::unique_ptr<DeviceMemory> workspace_;
};

}  // namespace cortado
