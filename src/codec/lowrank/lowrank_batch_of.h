// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// A LowRankBatch on a CUDA device or an emulated one.
#pragma once

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "codec/lowrank/lowrank_batch.h"
#include "codec/lowrank/lowrank_layout.h"
#include "core/check.h"

namespace cortado {

template <class Device>
class LowRankBatchOf final : public LowRankBatch {
 public:
  static Result<std::unique_ptr<LowRankBatch>> make(std::span<const LowRankTensor> tensors) {
    CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<Codec> codec, make_codec("acp"));
    auto batch = std::unique_ptr<LowRankBatchOf>(new LowRankBatchOf(std::move(codec), tensors));
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto& [pass, rank, row, col, output, number] = tensors[i];
      const bool is_float = pass.gradient_dtype != DType::kUint8;
      if (is_float && rank >= 0 && rank <= std::min(pass.rows, pass.cols)) continue;
      return make_error(StatusCode::kInvalidArgument,
                        "low rank on a device: tensor %zu is %lld x %lld of rank %d, of %s", i,
                        static_cast<long long>(pass.rows), static_cast<long long>(pass.cols), rank,
                        std::string(dtype_name(pass.gradient_dtype)).c_str());
    }
    return std::unique_ptr<LowRankBatch>(std::move(batch));
  }

  std::uint64_t workspace_bytes() const override { return layout_.workspace_bytes(); }

  Status set_up(std::span<const LowRankTensor> tensors, const DeviceKeys& keys, std::byte* workspace,
                DeviceStream stream) override {
    if (tensors.size() != shapes_.size() || workspace == nullptr || keys.step == nullptr) {
      return make_error(StatusCode::kInvalidArgument,
                        "low rank on a device: %zu tensors, expected %zu with a workspace", tensors.size(),
                        shapes_.size());
    }
    workspace_ = layout_.workspace(workspace, keys.step);
    std::vector<LowRankEntry> entries;
    std::vector<BasisKey> basis_keys;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i].pass.rows != shapes_[i].rows || tensors[i].pass.cols != shapes_[i].cols ||
          tensors[i].rank != shapes_[i].rank) {
        return make_error(StatusCode::kInvalidArgument,
                          "low rank on a device: tensor %zu has another shape than before", i);
      }
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
  std::vector<std::uint64_t> float_bases_;
  LowRankSteps steps_;
  Slot<float> floats_;
  DeviceWorkspace workspace_ = {};
};

}  // namespace cortado
