// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// A LowRankBatch on a CUDA device or an emulated one.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "codec/lowrank/lowrank_batch.h"
#include "codec/lowrank/lowrank_layout.h"
#include "core/check.h"
#include "core/checked_math.h"

namespace cortado {

template <class Device>
class LowRankBatchOf final : public LowRankBatch {
 public:
  static Result<std::unique_ptr<LowRankBatch>> make(std::span<const LowRankTensor> tensors) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const ResidualPass& pass = tensors[i].pass;
      const int rank = tensors[i].rank;
      const bool is_float = pass.gradient_dtype != DType::kUint8;
      const std::optional<std::int64_t> bytes = checked_size_bytes(pass.rows, pass.cols, pass.gradient_dtype);
      // Partial sums are no more than there are products.
      if (is_float && bytes.has_value() && rank >= 0 && rank <= std::min(pass.rows, pass.cols) &&
          checked_mul<std::int64_t>(*bytes, rank).has_value()) {
        continue;
      }
      return refused(i, "is " + std::to_string(pass.rows) + " x " + std::to_string(pass.cols) + " of rank " +
                            std::to_string(rank) + ", of " + std::string(dtype_name(pass.gradient_dtype)) +
                            ", expected fp32, fp16 or bf16, and a rank of no more than the shorter side");
    }
    CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<Codec> codec, make_codec("acp"));
    return std::unique_ptr<LowRankBatch>(new LowRankBatchOf(std::move(codec), tensors));
  }

  std::uint64_t workspace_bytes() const override { return layout_.workspace_bytes(); }

  Status set_up(std::span<const LowRankTensor> tensors, const DeviceKeys& keys, std::byte* workspace,
                DeviceStream stream) override {
    CORTADO_RETURN_IF_ERROR(check(tensors, keys, workspace));
    workspace_ = layout_.workspace(workspace, keys.step);
    std::vector<LowRankEntry> entries;
    std::vector<BasisKey> basis_keys;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      entries.push_back(entry_of(tensors[i], i));
      basis_keys.push_back({.seed = keys.seed, .step = 0, .tensor = tensors[i].number});
    }
    Device device(stream);
    device.upload(workspace, layout_.tables().data(), layout_.tables().size());
    device.upload(workspace_.at(steps_.entries), entries.data(), entries.size() * sizeof(LowRankEntry));
    device.upload(workspace_.at(steps_.keys), basis_keys.data(), basis_keys.size() * sizeof(BasisKey));
    return device.status();
  }

  Status project_rows(DeviceStream stream) override {
    return run(stream, [&](Device& device) { steps_.project(device, workspace_, LowRankSide::kRows); });
  }
  Status project_cols(DeviceStream stream) override {
    return run(stream, [&](Device& device) { steps_.project(device, workspace_, LowRankSide::kCols); });
  }
  Status orthogonalise_rows(DeviceStream stream) override {
    return run(stream, [&](Device& device) { steps_.orthogonalise(device, workspace_, LowRankSide::kRows); });
  }
  Status orthogonalise_cols(DeviceStream stream) override {
    return run(stream, [&](Device& device) { steps_.orthogonalise(device, workspace_, LowRankSide::kCols); });
  }
  Status random_col_basis(DeviceStream stream) override {
    return run(stream, [&](Device& device) { steps_.random_basis(device, workspace_); });
  }
  Status reconstruct(float scale, DeviceStream stream) override {
    return run(stream, [&](Device& device) { steps_.reconstruct(device, workspace_, scale); });
  }
  const std::uint32_t* faults() const override { return workspace_.tensors.faults; }

 private:
  LowRankBatchOf(std::unique_ptr<Codec> codec, std::span<const LowRankTensor> tensors)
      : codec_(std::move(codec)), layout_(*codec_, std::vector<DeviceTensor>(tensors.size())) {
    std::uint64_t floats = 0;
    for (const LowRankTensor& tensor : tensors) {
      const LowRankShape shape = {tensor.pass.rows, tensor.pass.cols, tensor.rank};
      shapes_.push_back(shape);
      dtypes_.push_back(tensor.pass.gradient_dtype);
      float_bases_.push_back(floats);
      floats +=
          static_cast<std::uint64_t>(shape.rows * shape.rank + row_partial_elems(shape.rows, shape.cols, shape.rank) +
                                     col_partial_elems(shape.rows, shape.cols, shape.rank));
    }
    steps_.launches = make_low_rank_launches(shapes_, layout_);
    steps_.entries = layout_.template scratch<LowRankEntry>(tensors.size());
    steps_.keys = layout_.template scratch<BasisKey>(tensors.size());
    floats_ = layout_.template scratch<float>(floats);
  }

  static Status refused(std::size_t i, const std::string& what) {
    return make_error(StatusCode::kInvalidArgument, "low rank on a device: tensor %zu %s", i, what.c_str());
  }

  Status check(std::span<const LowRankTensor> tensors, const DeviceKeys& keys, const std::byte* workspace) const {
    if (tensors.size() != shapes_.size() || workspace == nullptr || keys.step == nullptr ||
        !is_aligned(workspace, kWorkspaceAlignBytes)) {
      return make_error(StatusCode::kInvalidArgument,
                        "low rank on a device: %zu tensors, expected %zu, a step, and a workspace aligned to %zu bytes",
                        tensors.size(), shapes_.size(), kWorkspaceAlignBytes);
    }
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto& [pass, rank, row, col, output, number] = tensors[i];
      if (pass.rows != shapes_[i].rows || pass.cols != shapes_[i].cols || rank != shapes_[i].rank ||
          pass.gradient_dtype != dtypes_[i]) {
        return refused(i, "has another shape, rank or dtype than the batch was made for");
      }
      if (pass.rows == 0 || pass.cols == 0) continue;
      const bool has_factors = rank == 0 || (row != nullptr && col != nullptr);
      const bool has_sent = pass.sent.rank == 0 || (pass.sent.row != nullptr && pass.sent.col != nullptr);
      if (!has_factors || !has_sent || output == nullptr)
        return refused(i, "lacks a factor, what was sent or an output");
      const std::size_t elem_bytes = dtype_bytes(pass.gradient_dtype);
      bool are_aligned = is_aligned(pass.gradient, elem_bytes) && is_aligned(output, elem_bytes);
      for (const float* floats : {static_cast<const float*>(row), static_cast<const float*>(col), pass.residual_in,
                                  static_cast<const float*>(pass.residual_out), pass.sent.row, pass.sent.col}) {
        are_aligned = are_aligned && is_aligned(floats, sizeof(float));
      }
      if (!are_aligned) return refused(i, "has memory that is not aligned as its type");
    }
    return {};
  }

  template <class Launches>
  Status run(DeviceStream stream, const Launches& launches) {
    Device device(stream);
    launches(device);
    return device.status();
  }

  LowRankEntry entry_of(const LowRankTensor& tensor, std::size_t i) const {
    const auto& [rows, cols, rank] = shapes_[i];
    LowRankEntry entry = {};
    entry.rows = rows, entry.cols = cols, entry.rank = static_cast<int>(rank);
    entry.dtype = tensor.pass.gradient_dtype;
    entry.gradient = tensor.pass.gradient;
    entry.gradient_scale = tensor.pass.gradient_scale;
    entry.residual_in = tensor.pass.residual_in;
    entry.residual_out = tensor.pass.residual_out;
    entry.sent_row = tensor.pass.sent.row;
    entry.sent_col = tensor.pass.sent.col;
    entry.sent_rank = tensor.pass.sent.rank;
    entry.row = tensor.row;
    entry.col = tensor.col;
    entry.spare = workspace_.at(floats_) + float_bases_[i];
    entry.partial_rows = entry.spare + rows * rank;
    entry.partial_cols = entry.partial_rows + row_partial_elems(rows, cols, rank);
    entry.fault = workspace_.tensors.faults + i;
    entry.output = tensor.output;
    return entry;
  }

  std::unique_ptr<Codec> codec_;  // that the layout asks for sizes; of no tensor
  DeviceLayout layout_;
  std::vector<LowRankShape> shapes_;
  std::vector<DType> dtypes_;
  std::vector<std::uint64_t> float_bases_;
  LowRankSteps steps_;
  WorkspaceSlot<float> floats_;
  DeviceWorkspace workspace_ = {};
};

}  // namespace cortado
