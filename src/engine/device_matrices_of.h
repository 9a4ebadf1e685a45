// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// DeviceMatrices on a CUDA device or an emulated one.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "codec/lowrank/lowrank_layout.h"
#include "core/check.h"
#include "engine/device_matrices.h"
#include "engine/device_memory.h"

namespace cortado {

template <class Device>
class DeviceMatricesOf final : public DeviceMatrices {
 public:
  static Result<std::unique_ptr<DeviceMatrices>> make(const Setup& setup) {
    CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<Codec> codec, make_codec("acp"));
    std::unique_ptr<DeviceMatricesOf> matrices(new DeviceMatricesOf(setup, std::move(codec)));
    CORTADO_RETURN_IF_ERROR(matrices->allocate());
    return std::unique_ptr<DeviceMatrices>(std::move(matrices));
  }

  int slot_count() const override { return static_cast<int>(slots_.size()); }
  std::uint64_t scratch_bytes() const override { return in_scratch_.bytes(); }
  Status set_up(std::byte* scratch) override {
    scratch_ = scratch;
    return {};
  }

  void set_kind(int slot, SlotKind kind) override { slots_[static_cast<std::size_t>(slot)].kind = kind; }

  Status encode(std::span<void* const> gradients, const GradientScale& scale, std::int64_t) override {
    CORTADO_CHECK(gradients.size() == slots_.size(), "a gradient for each slot");
    scale_ = scale;
    is_second_ = false;
    for (std::size_t s = 0; s < slots_.size(); ++s) {
      Slot& slot = slots_[s];
      slot.gradient = gradients[s];
      slot.projection = slot.tensor->begin_encode(slot.kind);
      stage_pass(s);
    }
    return project();
  }

  void know_scale(double value) override { scale_ = {value}; }

  Result<bool> encoded() override { return queue().reached(encoded_event_); }

  bool write(int index, bool holds_zero_gradients, void* to) override {
    Slot& slot = slots_[static_cast<std::size_t>(index)];
    const auto& sums = reinterpret_cast<const LowRankSums*>(down_on_host_)[index];
    if (!is_second_ && holds_zero_gradients && sums.has_gradient == 0) {
      slot.tensor->hold(slot.kind, to);  // a pass over zeros has taken the pair from the residual, and that is all
      return true;
    }
    const BothFactors& factors = slot.projection.factors;
    if (factors.row != nullptr) std::memcpy(factors.row, down_on_host_ + slot.row_factor, bytes_of_row(slot));
    if (factors.col != nullptr) std::memcpy(factors.col, down_on_host_ + slot.col_factor, bytes_of_col(slot));
    const PassResult result{.sum_squares = sums.squares, .finite = sums.not_finite == 0};
    return is_second_ ? slot.tensor->finish_second_round(result, to)
                      : slot.tensor->finish_encode(slot.kind, result, to);
  }

  Status encode_second_round() override {
    is_second_ = true;
    for (std::size_t s = 0; s < slots_.size(); ++s) {
      slots_[s].projection = slots_[s].tensor->second_projection();
      LowRankEntry& entry = stage_pass(s);
      if (!setup_.has_feedback) continue;
      entry.gradient = nullptr;  // A is what the first pass left in the residual
      entry.residual_out = nullptr;
      entry.sent_rank = 0;
    }
    return project();
  }

  void take(int index, const void* summed) override {
    Slot& slot = slots_[static_cast<std::size_t>(index)];
    const std::optional<FactorPair> pair = slot.tensor->mean(slot.kind, summed);
    slot.mean_rank = pair.has_value() ? pair->rank : -1;
    if (pair.has_value()) put_pair(means_on_host_, slot, *pair);
  }

  Status decode(bool step_finite, std::span<const bool>) override {
    Device device(queue().stream());
    if (!step_finite && setup_.has_feedback) {
      for (std::size_t s = 0; s < slots_.size(); ++s) {
        LowRankEntry entry = pass_of(slots_[s]);
        if (slots_[s].tensor->is_held()) entry.residual_out = nullptr;
        reinterpret_cast<LowRankEntry*>(undo_on_host_)[s] = entry;
        put_pair(undo_on_host_, slots_[s], slots_[s].tensor->sent());
        slots_[s].tensor->rollback(nullptr);
      }
      CORTADO_RETURN_IF_ERROR(queue().copy_to_device(at(up_), undo_on_host_, pairs_.bytes()));
      passes_.undo(device, workspace_, entries());
    }
    for (std::size_t s = 0; s < slots_.size(); ++s) {
      LowRankEntry entry = entry_of(slots_[s]);
      entry.rank = std::max(0, slots_[s].mean_rank);
      entry.row = floats(up_ + slots_[s].row_pair);
      entry.col = floats(up_ + slots_[s].col_pair);
      entry.output = slots_[s].gradient;
      reinterpret_cast<LowRankEntry*>(means_on_host_)[s] = entry;
    }
    CORTADO_RETURN_IF_ERROR(queue().copy_to_device(at(up_), means_on_host_, pairs_.bytes()));
    passes_.reconstruct(device, workspace_, entries(), slots_[0].tensor->decode_scale(scale_.value));
    for (const Slot& slot : slots_) {
      const LowRankTensor::Setup& tensor = slot.tensor->setup();
      const auto elems = static_cast<std::uint64_t>(tensor.rows * tensor.cols);
      if (slot.mean_rank < 0) device.fill(slot.gradient, 0xff, elems * dtype_bytes(tensor.dtype));  // NaN
    }
    return device.status();
  }

  // Payloads can't be damaged, and what the next step writes to has been copied before its own copies have.
  Result<bool> decoded() override { return true; }

  Status read_residual(int slot, std::span<float> residual) override {
    CORTADO_RETURN_IF_ERROR(materialise());
    return copies_.read(at(slots_[static_cast<std::size_t>(slot)].residual), residual);
  }
  Status write_residual(int index, std::span<const float> residual) override {
    const Slot& slot = slots_[static_cast<std::size_t>(index)];
    slot.tensor->materialise_residual();  // forgets the pair
    return copies_.write(at(slot.residual), residual);
  }

  std::int64_t device_bytes() const override { return static_cast<std::int64_t>(on_device_.bytes()); }
  std::int64_t host_bytes() const override {
    return static_cast<std::int64_t>(on_host_.bytes()) + copies_.host_bytes();
  }

 private:
  struct Slot {
    LowRankTensor* tensor = nullptr;
    std::uint64_t residual = 0;                                              // offset in the device's memory
    std::uint64_t row_basis = 0, col_basis = 0, row_pair = 0, col_pair = 0;  // in what goes up
    std::uint64_t row_factor = 0, col_factor = 0;                            // in what comes down
    std::uint64_t row_partials = 0, col_partials = 0;                        // in scratch

    // Of the step in hand.
    SlotKind kind = SlotKind::kBothFactors;
    void* gradient = nullptr;
    LowRankTensor::Projection projection = {};
    int mean_rank = -1;  // -1: the mean is NaN
  };

  DeviceMatricesOf(const Setup& setup, std::unique_ptr<Codec> codec) : setup_(setup), codec_(std::move(codec)) {}

  static std::uint64_t bytes_of_row(const Slot& slot) { return float_bytes(slot.tensor->setup().rows, slot); }
  static std::uint64_t bytes_of_col(const Slot& slot) { return float_bytes(slot.tensor->setup().cols, slot); }
  static std::uint64_t float_bytes(std::int64_t length, const Slot& slot) {
    return static_cast<std::uint64_t>(length * slot.tensor->setup().rank) * sizeof(float);
  }
  static std::uint64_t float_bytes(std::int64_t elems) { return static_cast<std::uint64_t>(elems) * sizeof(float); }

  Status allocate() {
    std::vector<LowRankShape> shapes;
    for (LowRankTensor* const tensor : setup_.tensors) {
      const auto& [rows, cols, rank] =
          shapes.emplace_back(LowRankShape{tensor->setup().rows, tensor->setup().cols, tensor->setup().rank});
      Slot& slot = slots_.emplace_back();
      slot.tensor = tensor;
      if (setup_.has_feedback) slot.residual = on_device_.add(float_bytes(rows * cols));
      slot.row_partials = in_scratch_.add(float_bytes(narrow_row_factor_parts(cols) * rows * rank));
      slot.col_partials = in_scratch_.add(float_bytes(col_partial_elems(rows, cols, rank)));
    }
    // What goes up: entries, then pairs, then bases; the first two also with the means.
    pairs_.add(slots_.size() * sizeof(LowRankEntry));
    for (Slot& slot : slots_) {
      slot.row_pair = pairs_.add(float_bytes(slot.tensor->setup().rows * slot.tensor->most_sent_rank()));
      slot.col_pair = pairs_.add(float_bytes(slot.tensor->setup().cols * slot.tensor->most_sent_rank()));
    }
    DevicePieces up = pairs_, down;
    down.add(slots_.size() * sizeof(LowRankSums));
    for (Slot& slot : slots_) {
      slot.row_basis = up.add(bytes_of_row(slot));
      slot.col_basis = up.add(bytes_of_col(slot));
      slot.row_factor = down.add(bytes_of_row(slot));
      slot.col_factor = down.add(bytes_of_col(slot));
    }
    up_bytes_ = up.bytes();
    down_bytes_ = down.bytes();
    DeviceLayout layout(*codec_, std::vector<DeviceTensor>(slots_.size()));
    passes_ = make_low_rank_passes(shapes, layout);
    up_ = on_device_.add(up_bytes_);
    down_ = on_device_.add(down_bytes_);
    const std::uint64_t workspace = on_device_.add(layout.workspace_bytes());
    const std::uint64_t up_on_host = on_host_.add(up_bytes_), means = on_host_.add(pairs_.bytes());
    const std::uint64_t undo = on_host_.add(setup_.has_feedback ? pairs_.bytes() : 0);
    const std::uint64_t down_on_host = on_host_.add(down_bytes_);

    CORTADO_ASSIGN_OR_RETURN(memory_, queue().allocate_on_device(on_device_.bytes()));
    CORTADO_ASSIGN_OR_RETURN(std::byte* const host, queue().allocate_on_host(on_host_.bytes()));
    up_on_host_ = host + up_on_host;
    means_on_host_ = host + means;
    undo_on_host_ = host + undo;
    down_on_host_ = host + down_on_host;
    CORTADO_ASSIGN_OR_RETURN(encoded_event_, queue().make_event());
    CORTADO_RETURN_IF_ERROR(copies_.open(&queue(), setup_.has_feedback, setup_.timeout_s));
    workspace_ = layout.workspace(at(workspace), nullptr);
    Device device(queue().stream());
    device.upload(at(workspace), layout.tables().data(), layout.tables().size());
    return device.status();
  }

  // An entry on the device; what is projected, and what is kept, is up to the pass.
  LowRankEntry entry_of(const Slot& slot) const {
    const LowRankTensor::Setup& tensor = slot.tensor->setup();
    LowRankEntry entry = {};
    entry.rows = tensor.rows, entry.cols = tensor.cols;
    entry.dtype = tensor.dtype;
    entry.partial_rows = reinterpret_cast<float*>(scratch_ + slot.row_partials);
    entry.partial_cols = reinterpret_cast<float*>(scratch_ + slot.col_partials);
    entry.fault = workspace_.tensors.faults + (&slot - slots_.data());
    return entry;
  }

  static void put(std::byte* to, const float* from, std::uint64_t bytes) {
    if (from != nullptr) std::memcpy(to, from, bytes);
  }
  static void put_pair(std::byte* to, const Slot& slot, const FactorPair& pair) {
    put(to + slot.row_pair, pair.row, float_bytes(slot.tensor->setup().rows * pair.rank));
    put(to + slot.col_pair, pair.col, float_bytes(slot.tensor->setup().cols * pair.rank));
  }

  // The pass over gradient and residual.
  LowRankEntry pass_of(const Slot& slot) const {
    const BothBases& bases = slot.projection.bases;
    LowRankEntry entry = entry_of(slot);
    entry.rank = bases.rank;
    entry.gradient = slot.gradient;
    entry.gradient_scale = unscale_of(scale_.value);
    entry.loss_scale = scale_.on_device;
    if (setup_.has_feedback) entry.residual_in = entry.residual_out = floats(slot.residual);
    entry.sent_row = floats(up_ + slot.row_pair);
    entry.sent_col = floats(up_ + slot.col_pair);
    entry.sent_rank = slot.tensor->sent().rank;
    entry.row = floats(down_ + slot.row_factor);
    entry.col = floats(down_ + slot.col_factor);
    if (bases.row != nullptr) entry.row_basis = floats(up_ + slot.row_basis);
    if (bases.col != nullptr) entry.col_basis = floats(up_ + slot.col_basis);
    return entry;
  }

  // Writes it, and what it reads, to where it is copied from; to be changed by those who want another one.
  LowRankEntry& stage_pass(std::size_t s) {
    const Slot& slot = slots_[s];
    put_pair(up_on_host_, slot, slot.tensor->sent());
    put(up_on_host_ + slot.row_basis, slot.projection.bases.row, bytes_of_row(slot));
    put(up_on_host_ + slot.col_basis, slot.projection.bases.col, bytes_of_col(slot));
    return reinterpret_cast<LowRankEntry*>(up_on_host_)[s] = pass_of(slot);
  }

  Status project() {
    CORTADO_RETURN_IF_ERROR(queue().copy_to_device(at(up_), up_on_host_, up_bytes_));
    Device device(queue().stream());
    passes_.project(device, workspace_, entries(), reinterpret_cast<LowRankSums*>(at(down_)));
    CORTADO_RETURN_IF_ERROR(device.status());
    CORTADO_RETURN_IF_ERROR(queue().copy_to_host(down_on_host_, at(down_), down_bytes_));
    return queue().record(encoded_event_);
  }

  // Takes the pairs from the residuals.
  Status materialise() {
    if (std::all_of(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.tensor->sent().rank == 0; })) {
      return {};
    }
    CORTADO_RETURN_IF_ERROR(copies_.wait_for_queue());
    for (std::size_t s = 0; s < slots_.size(); ++s) {
      slots_[s].projection = {};
      stage_pass(s).gradient = nullptr;
      slots_[s].tensor->materialise_residual();  // forgets the pair
    }
    return project();
  }

  DeviceQueue& queue() const { return *setup_.queue; }
  std::byte* at(std::uint64_t offset) const { return memory_ + offset; }
  float* floats(std::uint64_t offset) const { return reinterpret_cast<float*>(at(offset)); }
  const LowRankEntry* entries() const { return reinterpret_cast<const LowRankEntry*>(at(up_)); }

  Setup setup_;
  std::unique_ptr<Codec> codec_;  // that the layout asks for sizes; of no tensor
  std::vector<Slot> slots_;
  LowRankPasses passes_;
  DeviceWorkspace workspace_ = {};

  DevicePieces on_device_, in_scratch_, on_host_, pairs_;
  std::uint64_t up_ = 0, up_bytes_ = 0, down_ = 0, down_bytes_ = 0;
  std::byte *memory_ = nullptr, *scratch_ = nullptr;  // on the device
  // Pinned. Each is written when the copy from it in the step before has been done: after encoded(), or, of what goes
  // up with encode(), after that of the step before.
  std::byte *up_on_host_ = nullptr, *means_on_host_ = nullptr, *undo_on_host_ = nullptr, *down_on_host_ = nullptr;
  ResidualCopies copies_;
  DeviceQueue::Event encoded_event_ = 0;
  bool is_second_ = false;
  GradientScale scale_;
};

}  // namespace cortado
