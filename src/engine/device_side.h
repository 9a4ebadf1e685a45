// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// DeviceSide: what an engine does with gradients that are on a device. Tensors of a codec with a device variant are
// encoded and decoded there (DeviceMessage); those that travel as factors are projected and reconstructed there
// (DeviceMatrices). Others, dense ones and those of the first dense steps among them, are copied to pinned memory, go
// through the engine as if they had been there, and are copied back. Whatever comes from the device is taken by next(),
// when it is there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/device_queue.h"
#include "cortado/engine.h"
#include "engine/device_matrices.h"
#include "engine/device_message.h"

namespace cortado {

// Where an engine's gradients are; no queue: on the host.
struct EngineDevice {
  std::unique_ptr<DeviceQueue> queue;
  Status failure = {};  // why there is no queue where there should be one
  Result<std::unique_ptr<DeviceMessage>> (*make_message)(const DeviceMessage::Setup&) = nullptr;
  Result<std::unique_ptr<DeviceMatrices>> (*make_matrices)(const DeviceMatrices::Setup&) = nullptr;
};

class DeviceSide {
 public:
  // gradient_bytes: of each tensor.
  DeviceSide(EngineDevice device, std::vector<std::int64_t> gradient_bytes);

  // The tensors of a codec in one message. kUnsupported: they can't be encoded on the device.
  Status add_message(const DeviceMessage::Setup& setup, std::vector<std::uint32_t> tensors);
  // The matrices of one message of factors.
  Status add_matrices(const DeviceMatrices::Setup& setup, std::vector<std::uint32_t> tensors);
  // After the last of them: memory for the other tensors, and with `all` for every tensor.
  Status allocate(bool all);

  bool encodes(std::uint32_t tensor) const { return places_[tensor].message >= 0; }

  // ---- a step

  Status begin_step(const GradientScale& scale, std::int64_t step, bool is_dense, DeviceStream compute);
  Status submit(std::span<const Gradient> gradients);
  // Of the matrices of the message that `tensor` is in.
  Status encode_second_round(std::uint32_t tensor);

  struct Arrival {
    DeviceQueue::Event event = 0;
    int message = -1;                         // whose payloads or factors are there
    bool is_second = false;                   // of the second round
    std::vector<std::uint32_t> on_host = {};  // or tensors that were copied
  };
  // The oldest that has not been taken, if it is there; nullptr if not. Valid until the next call.
  Result<const Arrival*> next();
  // Once something has arrived.
  double gradient_scale() const { return scale_.value; }
  bool awaits() const { return first_ < arrivals_in_use_; }

  // -- for who gives gradients that were copied to the host to another queue
  DeviceStream stream() const { return device_.queue->stream(); }
  // The gradient becomes what the copy of it is now.
  Status put_back(std::uint32_t tensor);
  // What is given to the queue comes after what the caller's stream has been given so far; and the other way round.
  Status follow() { return device_.queue->follow(compute_); }
  Status lead() { return device_.queue->lead(compute_); }

  std::byte* host_copy(std::uint32_t tensor) const { return host_copies_[tensor]; }
  const std::vector<std::uint32_t>& tensors_of(int message) const {
    return messages_[static_cast<std::size_t>(message)].tensors;
  }
  bool is_coded(int message) const { return messages_[static_cast<std::size_t>(message)].coded != nullptr; }
  std::span<const std::byte> payload(std::uint32_t tensor) const;
  bool finite(std::uint32_t tensor) const;
  bool has_gradient(std::uint32_t tensor) const;
  Status take(std::uint32_t tensor, int rank, std::span<const std::byte> payload);
  std::span<const std::byte> values(std::uint32_t tensor) const;
  void take_sum(std::uint32_t tensor, bool sent_zeros, std::span<const float> sum);
  // Of a tensor in a message of factors.
  DeviceMatrices& matrices_of(std::uint32_t tensor) { return *message_of(tensor).matrices; }
  int slot_of(std::uint32_t tensor) const { return places_[tensor].slot; }

  // After the verdict: means to where the gradients were, on the device.
  // holds_zeros: DeviceMessage::hold_zeros().
  Status finish_step(bool step_finite, const std::function<bool(std::uint32_t tensor)>& tensor_finite,
                     bool holds_zeros = false);

  // Whether all that finish_step() gave has been done; what was wrong with a payload.
  Result<bool> finished();

  std::int64_t memory_bytes() const;  // held, on the device and pinned

  // Of tensors coded here, and then of tensors encoded here.
  DifferenceSquares squares(std::uint32_t tensor) const;
  Status read_residual(std::uint32_t tensor, std::span<float> residual);
  Status write_residual(std::uint32_t tensor, std::span<const float> residual);

 private:
  struct Message {
    std::unique_ptr<DeviceWork> work;
    DeviceMessage* coded = nullptr;  // it is one of the two
    DeviceMatrices* matrices = nullptr;
    std::vector<std::uint32_t> tensors;
    std::vector<void*> gradients;
    std::unique_ptr<bool[]> finite;  // not std::vector<bool>, which has no elements to point to
    int missing = 0;
  };
  struct Place {
    int message = -1;
    int slot = 0;
  };

  void add(Message message, std::vector<std::uint32_t> tensors);
  Result<Arrival*> new_arrival();
  Message& message_of(std::uint32_t tensor) { return messages_[static_cast<std::size_t>(places_[tensor].message)]; }
  const Message& message_of(std::uint32_t tensor) const {
    return messages_[static_cast<std::size_t>(places_[tensor].message)];
  }

  EngineDevice device_;
  std::vector<std::int64_t> gradient_bytes_;
  std::uint64_t scratch_bytes_ = 0;
  std::vector<Message> messages_;
  std::vector<Place> places_;            // by tensor
  std::vector<std::byte*> host_copies_;  // by tensor
  std::vector<void*> gradients_;         // by tensor, of this step, that were copied to the host

  // Made once and used again in every step, in the order of the queue.
  std::deque<Arrival> arrivals_;
  std::size_t arrivals_in_use_ = 0, first_ = 0;

  bool is_dense_ = false;  // the step in hand
  bool decodes_ = false;   // finish_step() has given messages to decode
  GradientScale scale_;
  std::byte* scale_on_host_ = nullptr;
  std::int64_t step_ = 0;
  DeviceStream compute_ = nullptr;
};

}  // namespace cortado
