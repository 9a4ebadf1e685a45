// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// A DeviceMessage on a CUDA device or an emulated one.
#pragma once

#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "codec/device_registry.h"
#include "codec/stage.h"
#include "core/check.h"
#include "engine/device_memory.h"
#include "engine/device_message.h"
#include "feedback/feedback_device.h"

namespace cortado {

template <class Device>
class DeviceMessageOf final : public DeviceMessage {
 public:
  static Result<std::unique_ptr<DeviceMessage>> make(const Setup& setup) {
    CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<Codec> codec, make_codec(setup.codec));
    const char* reason = nullptr;
    if (!codec->row().traits.fixed_size) reason = "its payloads vary in size";
    if (codec->sparsifier() != nullptr && codec->sparsifier()->is_shared()) reason = "its values are summed";
    if (codec->row().traits.low_rank) reason = "its factors are summed";
    if (codec->is_majority_vote()) reason = "it takes a vote";
    if (reason != nullptr) {
      return make_error(StatusCode::kUnsupported, "messages of \"%s\" on a device: %s", setup.codec.c_str(), reason);
    }
    std::unique_ptr<DeviceMessageOf> message(new DeviceMessageOf(setup, std::move(codec)));
    CORTADO_RETURN_IF_ERROR(message->make_batches());
    CORTADO_RETURN_IF_ERROR(message->allocate());
    return std::unique_ptr<DeviceMessage>(std::move(message));
  }

  int slot_count() const override { return static_cast<int>(setup_.tensors.size()); }

  std::uint64_t scratch_bytes() const override { return in_scratch_.bytes(); }

  Status set_up(std::byte* scratch) override {
    scratch_ = scratch;
    const DeviceKeys keys{.seed = setup_.seed, .step = reinterpret_cast<const std::uint64_t*>(at(step_))};
    std::vector<DeviceTensor> tensors = shapes();
    for (std::size_t s = 0; s < slots(); ++s) {
      tensors[s].data = at(values_[s]);
      tensors[s].payload = at(encoded_) + payload_offsets_[s];
    }
    CORTADO_RETURN_IF_ERROR(encoder_->set_up(tensors, keys, at(encoder_workspace_), queue().stream()));
    for (std::size_t rank = 0; rank < ranks(); ++rank) {
      for (std::size_t s = 0; s < slots(); ++s) {
        tensors[s].data = scratch_ + decoded_[s];
        tensors[s].payload = at(received_) + rank * stride_ + payload_offsets_[s];
      }
      CORTADO_RETURN_IF_ERROR(decoders_[rank]->set_up(tensors, keys, at(decoder_workspaces_[rank]), queue().stream()));
    }
    return {};
  }

  Status encode(std::span<void* const> gradients, double gradient_scale, std::int64_t step) override {
    CORTADO_RETURN_IF_ERROR(point_to(gradients));
    gradient_scale_ = gradient_scale;
    const auto number = static_cast<std::uint64_t>(step);
    std::memcpy(step_on_host_, &number, sizeof(number));
    CORTADO_RETURN_IF_ERROR(queue().copy_to_device(at(step_), step_on_host_, sizeof(number)));
    Device device(queue().stream());
    feedback().add_gradients(device, feedback_step());
    CORTADO_RETURN_IF_ERROR(device.status());
    CORTADO_RETURN_IF_ERROR(encoder_->encode(queue().stream()));
    CORTADO_RETURN_IF_ERROR(queue().copy_to_host(sent_, at(encoded_), stride_));
    const auto* const flags = reinterpret_cast<const std::byte*>(feedback().table.flags);
    CORTADO_RETURN_IF_ERROR(
        queue().copy_to_host(reinterpret_cast<std::byte*>(flags_), flags, slots() * sizeof(std::uint32_t)));
    return queue().record(encoded_event_);
  }

  Result<bool> encoded() override { return queue().reached(encoded_event_); }

  std::span<const std::byte> payload(int slot) const override { return {sent_ + offset(slot), bytes(slot)}; }
  bool finite(int slot) const override { return (flags_[slot] & FeedbackTable::kNotFinite) == 0; }
  bool has_gradient(int slot) const override { return (flags_[slot] & FeedbackTable::kHasBits) != 0; }

  Status take(int rank, int slot, std::span<const std::byte> payload) override {
    if (payload.size() != bytes(slot)) {
      return make_error(StatusCode::kCorruptData, "payload of rank %d has %zu bytes, expected %zu", rank,
                        payload.size(), static_cast<std::size_t>(bytes(slot)));
    }
    std::memcpy(taken_ + static_cast<std::uint64_t>(rank) * stride_ + offset(slot), payload.data(), payload.size());
    return {};
  }

  Status decode(bool step_finite, std::span<const bool> slot_finite) override {
    CORTADO_RETURN_IF_ERROR(queue().copy_to_device(at(received_), taken_, ranks() * stride_));
    Device device(queue().stream());
    if (!step_finite && setup_.has_feedback) feedback().take_back(device, feedback_step());
    const double unscale = setup_.has_feedback ? gradient_scale_ : 1.0;
    const auto mean_scale = static_cast<float>(unscale / setup_.world_size);
    for (int rank = 0; rank < setup_.world_size; ++rank) {
      CORTADO_RETURN_IF_ERROR(decoders_[static_cast<std::size_t>(rank)]->decode(queue().stream()));
      feedback().take_decoded(device, rank, setup_.world_size, step_finite && rank == setup_.rank, mean_scale);
    }
    if (step_finite) feedback().sum_squares(device);
    for (std::size_t s = 0; s < slots(); ++s) {
      // NaN in every dtype.
      const Tensor& tensor = setup_.tensors[s];
      if (!slot_finite[s]) device.fill(entries_[s].gradient, 0xff, bytes_of(tensor, dtype_bytes(tensor.dtype)));
    }
    CORTADO_RETURN_IF_ERROR(device.status());
    for (std::size_t rank = 0; rank < ranks(); ++rank) {
      const auto* const faults = reinterpret_cast<const std::byte*>(decoders_[rank]->faults());
      CORTADO_RETURN_IF_ERROR(queue().copy_to_host(reinterpret_cast<std::byte*>(faults_ + rank * slots()), faults,
                                                   slots() * sizeof(std::uint32_t)));
    }
    if (step_finite) {
      const auto* const squares = reinterpret_cast<const std::byte*>(feedback().table.squares);
      CORTADO_RETURN_IF_ERROR(
          queue().copy_to_host(reinterpret_cast<std::byte*>(squares_), squares, slots() * sizeof(FeedbackSquares)));
    }
    return queue().record(decoded_event_);
  }

  Result<bool> decoded() override {
    CORTADO_ASSIGN_OR_RETURN(const bool is_there, queue().reached(decoded_event_));
    if (!is_there) return false;
    for (std::size_t i = 0; i < ranks() * slots(); ++i) {
      if (faults_[i] == 0) continue;
      return make_error(StatusCode::kCorruptData, "payload of rank %zu of \"%s\": %s", i / slots(),
                        setup_.tensors[i % slots()].name.c_str(), "the decoder on the device refuses it");
    }
    known_squares_.assign(squares_, squares_ + slots());
    return true;
  }

  FeedbackSquares squares(int slot) const override { return known_squares_[static_cast<std::size_t>(slot)]; }

  Status read_residual(int slot, std::span<float> residual) override {
    return copies_.read(values(static_cast<std::size_t>(slot)), residual);
  }
  Status write_residual(int slot, std::span<const float> residual) override {
    return copies_.write(values(static_cast<std::size_t>(slot)), residual);
  }

  std::int64_t device_bytes() const override { return static_cast<std::int64_t>(on_device_.bytes()); }
  std::int64_t host_bytes() const override {
    return static_cast<std::int64_t>(on_host_.bytes()) + copies_.host_bytes();
  }

 private:
  DeviceMessageOf(const Setup& setup, std::unique_ptr<Codec> codec) : setup_(setup), codec_(std::move(codec)) {}

  // ---- set-up

  static std::uint64_t bytes_of(const Tensor& tensor, std::size_t elem_bytes) {
    return static_cast<std::uint64_t>(tensor.rows * tensor.cols) * elem_bytes;
  }

  std::vector<DeviceTensor> shapes() const {
    std::vector<DeviceTensor> shapes;
    for (const Tensor& tensor : setup_.tensors) {
      shapes.push_back({.dtype = tensor.encoded, .rows = tensor.rows, .cols = tensor.cols, .number = tensor.number});
    }
    return shapes;
  }

  Status make_batches() {
    CORTADO_ASSIGN_OR_RETURN(encoder_, make_batch<Device>(setup_.codec, shapes()));
    for (std::size_t rank = 0; rank < ranks(); ++rank) {
      CORTADO_ASSIGN_OR_RETURN(decoders_.emplace_back(), make_batch<Device>(setup_.codec, shapes()));
    }
    return {};
  }

  Status allocate() {
    DeviceLayout layout(*codec_, shapes());
    slots_ = FeedbackSlots::make(layout);
    const std::uint64_t own_workspace = on_device_.add(layout.workspace_bytes());
    step_ = on_device_.add(sizeof(std::uint64_t));
    encoder_workspace_ = on_device_.add(encoder_->workspace_bytes());
    for (const auto& decoder : decoders_) decoder_workspaces_.push_back(on_device_.add(decoder->workspace_bytes()));
    for (const Tensor& tensor : setup_.tensors) {
      values_.push_back(on_device_.add(bytes_of(tensor, dtype_bytes(tensor.encoded))));
      decoded_.push_back(in_scratch_.add(bytes_of(tensor, dtype_bytes(tensor.encoded))));
      sums_.push_back(in_scratch_.add(bytes_of(tensor, sizeof(float))));
      payload_bytes_.push_back(codec_->max_payload_bytes(tensor.rows, tensor.cols, tensor.encoded));
      payload_offsets_.push_back(payloads_.add(payload_bytes_.back()));
    }
    stride_ = payloads_.bytes();
    encoded_ = on_device_.add(stride_);
    received_ = on_device_.add(ranks() * stride_);

    const std::uint64_t sent = on_host_.add(stride_), taken = on_host_.add(ranks() * stride_);
    const std::uint64_t flags = on_host_.add(slots() * sizeof(std::uint32_t));
    const std::uint64_t faults = on_host_.add(ranks() * slots() * sizeof(std::uint32_t));
    const std::uint64_t squares = on_host_.add(slots() * sizeof(FeedbackSquares));
    const std::uint64_t step = on_host_.add(sizeof(std::uint64_t));
    const std::uint64_t entries = on_host_.add(slots() * sizeof(FeedbackTensor));

    CORTADO_ASSIGN_OR_RETURN(memory_, queue().allocate_on_device(on_device_.bytes()));
    CORTADO_ASSIGN_OR_RETURN(std::byte* const host, queue().allocate_on_host(on_host_.bytes()));
    sent_ = host + sent;
    taken_ = host + taken;
    flags_ = reinterpret_cast<std::uint32_t*>(host + flags);
    faults_ = reinterpret_cast<std::uint32_t*>(host + faults);
    squares_ = reinterpret_cast<FeedbackSquares*>(host + squares);
    step_on_host_ = host + step;
    entries_on_host_ = host + entries;
    CORTADO_RETURN_IF_ERROR(copies_.open(&queue(), setup_.has_feedback));
    for (Event* event : {&encoded_event_, &decoded_event_}) {
      CORTADO_ASSIGN_OR_RETURN(*event, queue().make_event());
    }
    known_squares_.resize(slots());
    workspace_ = layout.workspace(at(own_workspace), nullptr);
    Device device(queue().stream());
    device.upload(at(own_workspace), layout.tables().data(), layout.tables().size());
    return device.status();
  }

  // ---- a step

  // Uploads the table if some pointer is another than in the step before.
  Status point_to(std::span<void* const> gradients) {
    CORTADO_CHECK(gradients.size() == slots(), "a gradient for each slot");
    bool is_same = !entries_.empty();
    for (std::size_t s = 0; is_same && s < slots(); ++s) is_same = entries_[s].gradient == gradients[s];
    if (is_same) return {};
    entries_.clear();
    for (std::size_t s = 0; s < slots(); ++s) {
      entries_.push_back({.gradient = gradients[s],
                          .values = at(values_[s]),
                          .velocity = nullptr,
                          .decoded = scratch_ + decoded_[s],
                          .sum = reinterpret_cast<float*>(scratch_ + sums_[s]),
                          .dtype = setup_.tensors[s].dtype,
                          .encoded = setup_.tensors[s].encoded});
    }
    const std::uint64_t bytes = entries_.size() * sizeof(FeedbackTensor);
    std::memcpy(entries_on_host_, entries_.data(), bytes);
    return queue().copy_to_device(reinterpret_cast<std::byte*>(workspace_.at(slots_.tensors)), entries_on_host_, bytes);
  }

  FeedbackLaunches feedback() const { return {slots_.table(workspace_, setup_.has_feedback)}; }
  FeedbackStep feedback_step() const {
    return FeedbackStep::of({.gradient_scale = static_cast<float>(1.0 / gradient_scale_)});
  }

  using Event = DeviceQueue::Event;

  DeviceQueue& queue() const { return *setup_.queue; }
  std::size_t slots() const { return setup_.tensors.size(); }
  std::size_t ranks() const { return static_cast<std::size_t>(setup_.world_size); }
  std::byte* at(std::uint64_t offset) const { return memory_ + offset; }
  std::byte* values(std::size_t slot) const { return at(values_[slot]); }
  std::uint64_t offset(int slot) const { return payload_offsets_[static_cast<std::size_t>(slot)]; }
  std::uint64_t bytes(int slot) const { return payload_bytes_[static_cast<std::size_t>(slot)]; }

  Setup setup_;
  std::unique_ptr<Codec> codec_;
  std::unique_ptr<DeviceBatch> encoder_;
  std::vector<std::unique_ptr<DeviceBatch>> decoders_;  // of each rank's payloads, all to the same memory
  FeedbackSlots slots_;
  DeviceWorkspace workspace_ = {};
  std::vector<FeedbackTensor> entries_;  // as uploaded last

  DevicePieces on_device_, in_scratch_, on_host_, payloads_;
  std::byte *memory_ = nullptr, *scratch_ = nullptr;  // on the device; the following are offsets in memory_
  std::uint64_t step_ = 0, encoder_workspace_ = 0;
  std::vector<std::uint64_t> decoder_workspaces_, values_;
  std::vector<std::uint64_t> decoded_, sums_;  // in scratch_
  std::uint64_t encoded_ = 0, received_ = 0;
  std::vector<std::uint64_t> payload_offsets_, payload_bytes_;  // of one rank
  std::uint64_t stride_ = 0;                                    // from one rank's payloads to the next one's

  // On the host, pinned.
  std::byte *sent_ = nullptr, *taken_ = nullptr, *step_on_host_ = nullptr, *entries_on_host_ = nullptr;
  std::uint32_t *flags_ = nullptr, *faults_ = nullptr;
  FeedbackSquares* squares_ = nullptr;
  std::vector<FeedbackSquares> known_squares_;  // of the last step that is known to have been decoded

  ResidualCopies copies_;
  Event encoded_event_ = 0, decoded_event_ = 0;
  double gradient_scale_ = 1;
};

}  // namespace cortado
