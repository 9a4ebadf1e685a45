// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// A DeviceMessage on a CUDA device or an emulated one.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "codec/device_batch.h"
#include "codec/payload_moves.h"
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
    if (codec->row().traits.low_rank) reason = "its factors are summed";
    if (codec->is_majority_vote()) reason = "it takes a vote";
    // Their sum would be rounded to the dtype before the mean is taken.
    const bool is_shared = codec->sparsifier() != nullptr && codec->sparsifier()->is_shared();
    const bool is_narrow = std::any_of(setup.tensors.begin(), setup.tensors.end(),
                                       [](const Tensor& tensor) { return tensor.encoded != DType::kFloat32; });
    if (is_shared && is_narrow) reason = "it sums values of fp16 or bf16 gradients without feedback";
    if (reason != nullptr) {
      return make_error(StatusCode::kUnsupported, "messages of \"%s\" on a device: %s", setup.codec.c_str(), reason);
    }
    std::unique_ptr<DeviceMessageOf> message(new DeviceMessageOf(setup, std::move(codec)));
    CORTADO_RETURN_IF_ERROR(message->make_batches());
    CORTADO_RETURN_IF_ERROR(message->allocate());
    return std::unique_ptr<DeviceMessage>(std::move(message));
  }

  int slot_count() const override { return static_cast<int>(setup_.tensors.size()); }

  // Payloads that were put close together lie where the decoded tensors come later, or in the next step.
  std::uint64_t scratch_bytes() const override {
    return is_fixed() ? in_scratch_.bytes() : std::max(in_scratch_.bytes(), sources() * stride_);
  }

  Status set_up(std::byte* scratch) override {
    scratch_ = scratch;
    const DeviceKeys keys{.seed = setup_.seed, .step = reinterpret_cast<const std::uint64_t*>(at(step_))};
    std::vector<DeviceTensor> tensors = shapes();
    for (std::size_t s = 0; s < slots(); ++s) {
      tensors[s].data = at(values_[s]);
      tensors[s].payload = at(encoded_) + payload_offsets_[s];
    }
    CORTADO_RETURN_IF_ERROR(encoder_->set_up(tensors, keys, at(encoder_workspace_), queue().stream()));
    for (std::size_t from = 0; from < sources(); ++from) {
      for (std::size_t s = 0; s < slots(); ++s) {
        tensors[s].data = scratch_ + decoded_[s];
        tensors[s].payload = at(received_) + from * stride_ + payload_offsets_[s];
      }
      CORTADO_RETURN_IF_ERROR(decoders_[from]->set_up(tensors, keys, at(decoder_workspaces_[from]), queue().stream()));
    }
    return {};
  }

  Status encode(std::span<void* const> gradients, const GradientScale& scale, std::int64_t step) override {
    CORTADO_RETURN_IF_ERROR(point_to(gradients));
    scale_ = scale;
    const auto number = static_cast<std::uint64_t>(step);
    std::memcpy(step_on_host_, &number, sizeof(number));
    CORTADO_RETURN_IF_ERROR(queue().copy_to_device(at(step_), step_on_host_, sizeof(number)));
    Device device(queue().stream());
    feedback().add_gradients(device, feedback_step());
    CORTADO_RETURN_IF_ERROR(device.status());
    CORTADO_RETURN_IF_ERROR(encoder_->encode(queue().stream()));
    const auto* const flags = reinterpret_cast<const std::byte*>(feedback().table.flags);
    CORTADO_RETURN_IF_ERROR(
        queue().copy_to_host(reinterpret_cast<std::byte*>(flags_), flags, slots() * sizeof(std::uint32_t)));
    taken_bytes_ = 0;
    sizes_are_known_ = is_fixed();
    if (is_fixed()) {
      CORTADO_RETURN_IF_ERROR(queue().copy_to_host(sent_, at(encoded_), stride_));
      return queue().record(encoded_event_);
    }
    const auto* const sizes = reinterpret_cast<const std::byte*>(encoder_->payload_bytes());
    CORTADO_RETURN_IF_ERROR(
        queue().copy_to_host(reinterpret_cast<std::byte*>(sizes_), sizes, slots() * sizeof(std::uint64_t)));
    return queue().record(sized_event_);
  }

  void hold_zeros(bool holds) override { holds_zeros_ = holds; }
  void know_scale(double value) override { scale_ = {value}; }

  Result<bool> encoded() override {
    if (!sizes_are_known_) {
      CORTADO_ASSIGN_OR_RETURN(sizes_are_known_, queue().reached(sized_event_));
      if (!sizes_are_known_) return false;
      CORTADO_RETURN_IF_ERROR(fetch_payloads());
    }
    return queue().reached(encoded_event_);
  }

  std::span<const std::byte> payload(int slot) const override {
    if (is_fixed()) return {sent_ + offset(slot), room(slot)};
    const auto s = static_cast<std::size_t>(slot);
    return {sent_ + sent_offsets_[s], static_cast<std::size_t>(sizes_[s])};
  }
  bool finite(int slot) const override { return (flags_[slot] & FeedbackTable::kNotFinite) == 0; }
  bool has_gradient(int slot) const override { return (flags_[slot] & FeedbackTable::kHasBits) != 0; }

  Status take(int rank, int slot, std::span<const std::byte> payload) override {
    if (is_fixed() ? payload.size() != room(slot) : payload.size() > room(slot)) {
      return make_error(StatusCode::kCorruptData, "payload of rank %d has %zu bytes, expected %s%zu", rank,
                        payload.size(), is_fixed() ? "" : "at most ", static_cast<std::size_t>(room(slot)));
    }
    const std::uint64_t own_room = static_cast<std::uint64_t>(rank) * stride_ + offset(slot);
    if (is_fixed()) {
      std::memcpy(taken_ + own_room, payload.data(), payload.size());
      return {};
    }
    // Other slots' payloads are taken at the same time; in which order they lie there matters to nobody.
    const std::uint64_t begin = taken_bytes_.fetch_add(aligned(payload.size()), std::memory_order_relaxed);
    const std::size_t i = static_cast<std::size_t>(rank) * slots() + static_cast<std::size_t>(slot);
    taken_moves_[i] = {.from = begin, .to = own_room, .bytes = payload.size()};
    taken_sizes_[i] = payload.size();
    std::memcpy(taken_ + begin, payload.data(), payload.size());
    return {};
  }

  std::span<const std::byte> values(int slot) const override { return payload(slot).subspan(index_bytes(slot)); }

  // Two payloads of the places that all ranks share: with the values that were sent, and with their sum.
  void take_sum(int slot, bool sent_zeros, std::span<const float> sum) override {
    std::byte* const sent = taken_ + offset(slot);
    std::byte* const summed = sent + stride_;
    const std::uint64_t begin = index_bytes(slot);
    std::memcpy(sent, payload(slot).data(), room(slot));
    if (sent_zeros) std::memset(sent + begin, 0, room(slot) - begin);
    std::memcpy(summed, sent, begin);
    std::memcpy(summed + begin, sum.data(), sum.size_bytes());
  }

  Status decode(bool step_finite, std::span<const bool> slot_finite) override {
    CORTADO_RETURN_IF_ERROR(upload_payloads());
    Device device(queue().stream());
    if (!step_finite && setup_.has_feedback) feedback().take_back(device, feedback_step());
    if (is_summed_) {
      CORTADO_RETURN_IF_ERROR(decoders_[0]->decode(queue().stream()));
      if (step_finite)
        feedback().take_decoded(device, /*rank=*/0, /*world_size=*/2, /*is_own=*/true, 1.0f, holds_zeros_);
      CORTADO_RETURN_IF_ERROR(decoders_[1]->decode(queue().stream()));
      feedback().take_decoded(device, /*rank=*/0, /*world_size=*/1, /*is_own=*/false, mean_scale(), holds_zeros_);
    }
    for (int rank = 0; rank < setup_.world_size && !is_summed_; ++rank) {
      CORTADO_RETURN_IF_ERROR(decoders_[static_cast<std::size_t>(rank)]->decode(queue().stream()));
      const bool is_own = step_finite && rank == setup_.rank;
      feedback().take_decoded(device, rank, setup_.world_size, is_own, mean_scale(), holds_zeros_);
    }
    if (step_finite) feedback().sum_squares(device);
    for (std::size_t s = 0; s < slots(); ++s) {
      // NaN in every dtype.
      const Tensor& tensor = setup_.tensors[s];
      if (!slot_finite[s]) device.fill(entries_[s].gradient, 0xff, bytes_of(tensor, dtype_bytes(tensor.dtype)));
    }
    CORTADO_RETURN_IF_ERROR(device.status());
    for (std::size_t from = 0; from < sources(); ++from) {
      const auto* const faults = reinterpret_cast<const std::byte*>(decoders_[from]->faults());
      CORTADO_RETURN_IF_ERROR(queue().copy_to_host(reinterpret_cast<std::byte*>(faults_ + from * slots()), faults,
                                                   slots() * sizeof(std::uint32_t)));
    }
    if (step_finite) {
      const auto* const squares = reinterpret_cast<const std::byte*>(feedback().table.squares);
      CORTADO_RETURN_IF_ERROR(
          queue().copy_to_host(reinterpret_cast<std::byte*>(squares_), squares, slots() * sizeof(DifferenceSquares)));
    }
    return queue().record(decoded_event_);
  }

  Result<bool> decoded() override {
    CORTADO_ASSIGN_OR_RETURN(const bool is_there, queue().reached(decoded_event_));
    if (!is_there) return false;
    for (std::size_t i = 0; i < sources() * slots(); ++i) {
      if (faults_[i] == 0) continue;
      return make_error(StatusCode::kCorruptData, "payload of rank %zu of \"%s\": %s", i / slots(),
                        setup_.tensors[i % slots()].name.c_str(), "the decoder on the device refuses it");
    }
    known_squares_.assign(squares_, squares_ + slots());
    return true;
  }

  DifferenceSquares squares(int slot) const override { return known_squares_[static_cast<std::size_t>(slot)]; }

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
  DeviceMessageOf(const Setup& setup, std::unique_ptr<Codec> codec)
      : setup_(setup),
        codec_(std::move(codec)),
        is_summed_(codec_->sparsifier() != nullptr && codec_->sparsifier()->is_shared()) {}

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
    for (std::size_t from = 0; from < sources(); ++from) {
      CORTADO_ASSIGN_OR_RETURN(decoders_.emplace_back(), make_batch<Device>(setup_.codec, shapes()));
    }
    return {};
  }

  Status allocate() {
    DeviceLayout layout(*codec_, shapes());
    slots_ = FeedbackSlots::make(layout);
    if (!is_fixed()) {
      std::vector<std::int64_t> most_bytes;
      for (const TensorEntry& entry : layout.tensors()) {
        most_bytes.push_back(static_cast<std::int64_t>(entry.max_payload_bytes));
      }
      move_tiles_ = layout.tile(most_bytes, MovePayloads::kTileBytes);
      moves_ = layout.scratch<PayloadMove>(sources() * slots());
      sent_offsets_.resize(slots());
    }
    const std::uint64_t own_workspace = on_device_.add(layout.workspace_bytes());
    step_ = on_device_.add(sizeof(std::uint64_t));
    encoder_workspace_ = on_device_.add(encoder_->workspace_bytes());
    for (const auto& decoder : decoders_) decoder_workspaces_.push_back(on_device_.add(decoder->workspace_bytes()));
    for (const Tensor& tensor : setup_.tensors) {
      values_.push_back(on_device_.add(bytes_of(tensor, dtype_bytes(tensor.encoded))));
      if (setup_.has_feedback && setup_.is_exact) spares_.push_back(on_device_.add(bytes_of(tensor, sizeof(float))));
      decoded_.push_back(in_scratch_.add(bytes_of(tensor, dtype_bytes(tensor.encoded))));
      sums_.push_back(in_scratch_.add(bytes_of(tensor, sizeof(float))));
      room_.push_back(codec_->max_payload_bytes(tensor.rows, tensor.cols, tensor.encoded));
      payload_offsets_.push_back(payloads_.add(room_.back()));
      value_bytes_.push_back(is_summed_ ? bytes_of_floats(codec_->sparsifier()->max_kept(tensor.rows, tensor.cols))
                                        : room_.back());
    }
    stride_ = payloads_.bytes();
    encoded_ = on_device_.add(stride_);
    received_ = on_device_.add(sources() * stride_);

    const std::uint64_t sent = on_host_.add(stride_), taken = on_host_.add(sources() * stride_);
    const std::uint64_t flags = on_host_.add(slots() * sizeof(std::uint32_t));
    const std::uint64_t faults = on_host_.add(sources() * slots() * sizeof(std::uint32_t));
    const std::size_t varying = is_fixed() ? 0 : slots();
    const std::uint64_t sizes = on_host_.add(varying * sizeof(std::uint64_t));
    const std::uint64_t sent_moves = on_host_.add(varying * sizeof(PayloadMove));
    const std::uint64_t taken_sizes = on_host_.add(sources() * varying * sizeof(std::uint64_t));
    const std::uint64_t taken_moves = on_host_.add(sources() * varying * sizeof(PayloadMove));
    const std::uint64_t squares = on_host_.add(slots() * sizeof(DifferenceSquares));
    const std::uint64_t step = on_host_.add(sizeof(std::uint64_t));
    const std::uint64_t entries = on_host_.add(slots() * sizeof(FeedbackTensor));

    CORTADO_ASSIGN_OR_RETURN(memory_, queue().allocate_on_device(on_device_.bytes()));
    CORTADO_ASSIGN_OR_RETURN(std::byte* const host, queue().allocate_on_host(on_host_.bytes()));
    sent_ = host + sent;
    taken_ = host + taken;
    flags_ = reinterpret_cast<std::uint32_t*>(host + flags);
    faults_ = reinterpret_cast<std::uint32_t*>(host + faults);
    squares_ = reinterpret_cast<DifferenceSquares*>(host + squares);
    sizes_ = reinterpret_cast<std::uint64_t*>(host + sizes);
    sent_moves_ = reinterpret_cast<PayloadMove*>(host + sent_moves);
    taken_sizes_ = reinterpret_cast<std::uint64_t*>(host + taken_sizes);
    taken_moves_ = reinterpret_cast<PayloadMove*>(host + taken_moves);
    step_on_host_ = host + step;
    entries_on_host_ = host + entries;
    CORTADO_RETURN_IF_ERROR(copies_.open(&queue(), setup_.has_feedback, setup_.timeout_s));
    for (Event* event : {&sized_event_, &encoded_event_, &decoded_event_}) {
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
                          .spare = spares_.empty() ? nullptr : reinterpret_cast<float*>(at(spares_[s])),
                          .decoded = scratch_ + decoded_[s],
                          .sum = reinterpret_cast<float*>(scratch_ + sums_[s]),
                          .dtype = setup_.tensors[s].dtype,
                          .encoded = setup_.tensors[s].encoded});
    }
    const std::uint64_t bytes = entries_.size() * sizeof(FeedbackTensor);
    std::memcpy(entries_on_host_, entries_.data(), bytes);
    return queue().copy_to_device(reinterpret_cast<std::byte*>(workspace_.at(slots_.tensors)), entries_on_host_, bytes);
  }

  // What has come to be of a size each goes to the host in one copy.
  Status fetch_payloads() {
    std::uint64_t end = 0;
    for (std::size_t s = 0; s < slots(); ++s) {
      CORTADO_CHECK(sizes_[s] <= room_[s], "a payload of %llu bytes", static_cast<unsigned long long>(sizes_[s]));
      sent_offsets_[s] = end;
      sent_moves_[s] = {.from = payload_offsets_[s], .to = end, .bytes = sizes_[s]};
      end += aligned(sizes_[s]);
    }
    CORTADO_RETURN_IF_ERROR(move(sent_moves_, /*ranks=*/1, at(encoded_), scratch_));
    CORTADO_RETURN_IF_ERROR(queue().copy_to_host(sent_, scratch_, end));
    return queue().record(encoded_event_);
  }

  // All that was taken, to its room on the device.
  Status upload_payloads() {
    if (is_fixed()) return queue().copy_to_device(at(received_), taken_, sources() * stride_);
    CORTADO_RETURN_IF_ERROR(queue().copy_to_device(scratch_, taken_, taken_bytes_));
    CORTADO_RETURN_IF_ERROR(move(taken_moves_, sources(), scratch_, at(received_)));
    for (std::size_t from = 0; from < sources(); ++from) {
      CORTADO_RETURN_IF_ERROR(queue().copy_to_device(reinterpret_cast<std::byte*>(decoders_[from]->payload_bytes()),
                                                     reinterpret_cast<const std::byte*>(taken_sizes_ + from * slots()),
                                                     slots() * sizeof(std::uint64_t)));
    }
    return {};
  }

  Status move(const PayloadMove* moves, std::size_t ranks, const std::byte* from, std::byte* to) {
    PayloadMove* const on_device = workspace_.at(moves_);
    CORTADO_RETURN_IF_ERROR(queue().copy_to_device(reinterpret_cast<std::byte*>(on_device),
                                                   reinterpret_cast<const std::byte*>(moves),
                                                   ranks * slots() * sizeof(PayloadMove)));
    Device device(queue().stream());
    device.launch(static_cast<std::int64_t>(ranks) * move_tiles_.tiles,
                  MovePayloads{.tiling = workspace_.tiling(move_tiles_),
                               .moves = on_device,
                               .payloads = static_cast<std::int64_t>(slots()),
                               .from = from,
                               .to = to});
    return device.status();
  }

  FeedbackLaunches feedback() const { return {slots_.table(workspace_, setup_.has_feedback)}; }
  FeedbackStep feedback_step() const {
    FeedbackStep step = FeedbackStep::of({.gradient_scale = unscale_of(scale_.value)});
    step.loss_scale = scale_.on_device;
    return step;
  }

  using Event = DeviceQueue::Event;

  DeviceQueue& queue() const { return *setup_.queue; }
  std::size_t slots() const { return setup_.tensors.size(); }
  // Whose payloads are decoded: the ranks'; of sums this rank's, and the sum.
  std::size_t sources() const { return is_summed_ ? 2 : static_cast<std::size_t>(setup_.world_size); }
  bool is_fixed() const { return codec_->row().traits.fixed_size; }
  float mean_scale() const {
    return static_cast<float>((setup_.has_feedback ? scale_.value : 1.0) / setup_.world_size);
  }
  std::byte* at(std::uint64_t offset) const { return memory_ + offset; }
  std::byte* values(std::size_t slot) const { return at(values_[slot]); }
  std::uint64_t offset(int slot) const { return payload_offsets_[static_cast<std::size_t>(slot)]; }
  std::uint64_t room(int slot) const { return room_[static_cast<std::size_t>(slot)]; }
  std::uint64_t index_bytes(int slot) const { return room(slot) - value_bytes_[static_cast<std::size_t>(slot)]; }
  // What lies close together: as copy_share() is fastest.
  static std::uint64_t aligned(std::uint64_t bytes) { return (bytes + 15) / 16 * 16; }
  static std::uint64_t bytes_of_floats(std::int64_t count) { return static_cast<std::uint64_t>(count) * sizeof(float); }

  Setup setup_;
  std::unique_ptr<Codec> codec_;
  bool is_summed_;
  std::unique_ptr<DeviceBatch> encoder_;
  std::vector<std::unique_ptr<DeviceBatch>> decoders_;  // of each source's payloads, all to the same memory
  FeedbackSlots slots_;
  DeviceWorkspace workspace_ = {};
  std::vector<FeedbackTensor> entries_;  // as uploaded last

  DevicePieces on_device_, in_scratch_, on_host_, payloads_;
  std::byte *memory_ = nullptr, *scratch_ = nullptr;  // on the device; the following are offsets in memory_
  std::uint64_t step_ = 0, encoder_workspace_ = 0;
  std::vector<std::uint64_t> decoder_workspaces_, values_, spares_;
  std::vector<std::uint64_t> decoded_, sums_;  // in scratch_
  std::uint64_t encoded_ = 0, received_ = 0;
  std::vector<std::uint64_t> payload_offsets_, room_, value_bytes_;  // of one source
  std::uint64_t stride_ = 0;                                         // from one source's payloads to the next one's
  // Of sizes that vary.
  TilingSlots move_tiles_;
  WorkspaceSlot<PayloadMove> moves_;
  std::vector<std::uint64_t> sent_offsets_;     // in sent_
  std::atomic<std::uint64_t> taken_bytes_ = 0;  // of taken_, in use
  bool sizes_are_known_ = false;
  bool holds_zeros_ = false;

  // On the host, pinned.
  std::byte *sent_ = nullptr, *taken_ = nullptr, *step_on_host_ = nullptr, *entries_on_host_ = nullptr;
  std::uint32_t *flags_ = nullptr, *faults_ = nullptr;
  DifferenceSquares* squares_ = nullptr;
  std::uint64_t *sizes_ = nullptr, *taken_sizes_ = nullptr;
  PayloadMove *sent_moves_ = nullptr, *taken_moves_ = nullptr;
  std::vector<DifferenceSquares> known_squares_;  // of the last step that is known to have been decoded

  ResidualCopies copies_;
  Event sized_event_ = 0, encoded_event_ = 0, decoded_event_ = 0;
  GradientScale scale_;
};

}  // namespace cortado
