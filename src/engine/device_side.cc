// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "engine/device_side.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/check.h"

namespace cortado {

DeviceSide::DeviceSide(EngineDevice device, std::vector<std::int64_t> gradient_bytes)
    : device_(std::move(device)),
      gradient_bytes_(std::move(gradient_bytes)),
      places_(gradient_bytes_.size()),
      host_copies_(gradient_bytes_.size()),
      gradients_(gradient_bytes_.size()) {}

Status DeviceSide::add_message(const DeviceMessage::Setup& given, std::vector<std::uint32_t> tensors) {
  DeviceMessage::Setup setup = given;
  setup.queue = device_.queue.get();
  CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<DeviceMessage> made, device_.make_message(setup));
  Message message;
  message.coded = made.get();
  message.work = std::move(made);
  add(std::move(message), std::move(tensors));
  return {};
}

Status DeviceSide::add_matrices(const DeviceMatrices::Setup& given, std::vector<std::uint32_t> tensors) {
  DeviceMatrices::Setup setup = given;
  setup.queue = device_.queue.get();
  CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<DeviceMatrices> made, device_.make_matrices(setup));
  Message message;
  message.matrices = made.get();
  message.work = std::move(made);
  add(std::move(message), std::move(tensors));
  return {};
}

void DeviceSide::add(Message message, std::vector<std::uint32_t> tensors) {
  for (std::size_t s = 0; s < tensors.size(); ++s) {
    places_[tensors[s]] = {static_cast<int>(messages_.size()), static_cast<int>(s)};
  }
  message.gradients.resize(tensors.size());
  message.finite = std::make_unique<bool[]>(tensors.size());
  message.tensors = std::move(tensors);
  messages_.push_back(std::move(message));
}

Status DeviceSide::allocate(bool all) {
  CORTADO_ASSIGN_OR_RETURN(scale_on_host_, device_.queue->allocate_on_host(sizeof(float)));
  for (const Message& message : messages_) scratch_bytes_ = std::max(scratch_bytes_, message.work->scratch_bytes());
  if (!messages_.empty()) {
    CORTADO_ASSIGN_OR_RETURN(std::byte* const scratch, device_.queue->allocate_on_device(scratch_bytes_));
    for (const Message& message : messages_) CORTADO_RETURN_IF_ERROR(message.work->set_up(scratch));
  }
  for (std::uint32_t t = 0; t < host_copies_.size(); ++t) {
    if (gradient_bytes_[t] == 0 || (encodes(t) && !all)) continue;
    CORTADO_ASSIGN_OR_RETURN(host_copies_[t],
                             device_.queue->allocate_on_host(static_cast<std::uint64_t>(gradient_bytes_[t])));
  }
  return {};
}

Status DeviceSide::begin_step(const GradientScale& scale, std::int64_t step, bool is_dense, DeviceStream compute) {
  scale_ = scale;
  step_ = step;
  is_dense_ = is_dense;
  compute_ = compute;
  arrivals_in_use_ = first_ = 0;
  std::fill(gradients_.begin(), gradients_.end(), nullptr);
  for (Message& message : messages_) message.missing = static_cast<int>(message.tensors.size());
  if (scale_.on_device == nullptr) return {};
  // It comes before all that is submitted, so it is there when something of that is.
  CORTADO_RETURN_IF_ERROR(device_.queue->follow(compute_));
  return device_.queue->copy_to_host(scale_on_host_, reinterpret_cast<const std::byte*>(scale_.on_device),
                                     sizeof(float));
}

Result<DeviceSide::Arrival*> DeviceSide::new_arrival() {
  if (arrivals_in_use_ == arrivals_.size()) {
    CORTADO_ASSIGN_OR_RETURN(const DeviceQueue::Event event, device_.queue->make_event());
    arrivals_.push_back({.event = event});
  }
  Arrival& arrival = arrivals_[arrivals_in_use_++];
  arrival.message = -1;
  arrival.is_second = false;
  arrival.on_host.clear();
  return &arrival;
}

Status DeviceSide::submit(std::span<const Gradient> gradients) {
  if (gradients.empty()) return {};
  CORTADO_RETURN_IF_ERROR(device_.queue->follow(compute_));
  Arrival* copies = nullptr;
  for (const Gradient& gradient : gradients) {
    if (gradient_bytes_[gradient.tensor] == 0) continue;
    if (!is_dense_ && encodes(gradient.tensor)) {
      Message& message = message_of(gradient.tensor);
      message.gradients[static_cast<std::size_t>(places_[gradient.tensor].slot)] = gradient.data;
      --message.missing;
      continue;
    }
    if (copies == nullptr) {
      CORTADO_ASSIGN_OR_RETURN(copies, new_arrival());
    }
    gradients_[gradient.tensor] = gradient.data;
    copies->on_host.push_back(gradient.tensor);
    CORTADO_RETURN_IF_ERROR(device_.queue->copy_to_host(host_copies_[gradient.tensor],
                                                        static_cast<const std::byte*>(gradient.data),
                                                        static_cast<std::uint64_t>(gradient_bytes_[gradient.tensor])));
  }
  if (copies != nullptr) CORTADO_RETURN_IF_ERROR(device_.queue->record(copies->event));
  for (const Gradient& gradient : gradients) {
    if (is_dense_ || !encodes(gradient.tensor)) continue;
    Message& message = message_of(gradient.tensor);
    if (message.missing != 0) continue;
    message.missing = -1;  // once
    CORTADO_ASSIGN_OR_RETURN(Arrival* const payloads, new_arrival());
    payloads->message = places_[gradient.tensor].message;
    CORTADO_RETURN_IF_ERROR(message.work->encode(message.gradients, scale_, step_));
  }
  return {};
}

Status DeviceSide::encode_second_round(std::uint32_t tensor) {
  CORTADO_ASSIGN_OR_RETURN(Arrival* const factors, new_arrival());
  factors->message = places_[tensor].message;
  factors->is_second = true;
  return matrices_of(tensor).encode_second_round();
}

Result<const DeviceSide::Arrival*> DeviceSide::next() {
  if (!awaits()) return nullptr;
  // Later ones may have more to give to the queue.
  for (std::size_t i = first_ + 1; i < arrivals_in_use_; ++i) {
    if (arrivals_[i].message < 0) continue;
    CORTADO_RETURN_IF_ERROR(messages_[static_cast<std::size_t>(arrivals_[i].message)].work->encoded().status());
  }
  const Arrival& arrival = arrivals_[first_];
  CORTADO_ASSIGN_OR_RETURN(const bool is_there,
                           arrival.message < 0 ? device_.queue->reached(arrival.event)
                                               : messages_[static_cast<std::size_t>(arrival.message)].work->encoded());
  if (!is_there) return nullptr;
  if (scale_.on_device != nullptr) {
    float value;
    std::memcpy(&value, scale_on_host_, sizeof(value));
    scale_ = {value};
    for (Message& message : messages_) message.work->know_scale(value);
  }
  ++first_;
  return &arrival;
}

Status DeviceSide::put_back(std::uint32_t tensor) {
  return device_.queue->copy_to_device(static_cast<std::byte*>(gradients_[tensor]), host_copies_[tensor],
                                       static_cast<std::uint64_t>(gradient_bytes_[tensor]));
}

std::span<const std::byte> DeviceSide::payload(std::uint32_t tensor) const {
  return message_of(tensor).coded->payload(places_[tensor].slot);
}

bool DeviceSide::finite(std::uint32_t tensor) const { return message_of(tensor).coded->finite(places_[tensor].slot); }

bool DeviceSide::has_gradient(std::uint32_t tensor) const {
  return message_of(tensor).coded->has_gradient(places_[tensor].slot);
}

Status DeviceSide::take(std::uint32_t tensor, int rank, std::span<const std::byte> payload) {
  return message_of(tensor).coded->take(rank, places_[tensor].slot, payload);
}

std::span<const std::byte> DeviceSide::values(std::uint32_t tensor) const {
  return message_of(tensor).coded->values(places_[tensor].slot);
}

void DeviceSide::take_sum(std::uint32_t tensor, bool sent_zeros, std::span<const float> sum) {
  message_of(tensor).coded->take_sum(places_[tensor].slot, sent_zeros, sum);
}

Status DeviceSide::finish_step(bool step_finite, const std::function<bool(std::uint32_t tensor)>& tensor_finite,
                               bool holds_zeros) {
  decodes_ = !is_dense_;
  // Gradients are written now; what the caller has queued since they were submitted may still read them.
  CORTADO_RETURN_IF_ERROR(device_.queue->follow(compute_));
  for (Message& message : messages_) {
    if (is_dense_) break;
    const std::size_t slots = message.tensors.size();
    for (std::size_t s = 0; s < slots; ++s) message.finite[s] = tensor_finite(message.tensors[s]);
    if (message.coded != nullptr) message.coded->hold_zeros(holds_zeros);
    CORTADO_RETURN_IF_ERROR(message.work->decode(step_finite, {message.finite.get(), slots}));
  }
  for (std::uint32_t t = 0; t < gradients_.size(); ++t) {
    if (gradients_[t] != nullptr) CORTADO_RETURN_IF_ERROR(put_back(t));
  }
  return device_.queue->lead(compute_);
}

Result<bool> DeviceSide::finished() {
  for (Message& message : messages_) {
    if (!decodes_) break;
    CORTADO_ASSIGN_OR_RETURN(const bool is_done, message.work->decoded());
    if (!is_done) return false;
  }
  decodes_ = false;
  return true;
}

std::int64_t DeviceSide::memory_bytes() const {
  auto bytes = static_cast<std::int64_t>(scratch_bytes_);
  for (const Message& message : messages_) bytes += message.work->device_bytes() + message.work->host_bytes();
  for (std::uint32_t t = 0; t < host_copies_.size(); ++t) bytes += host_copies_[t] == nullptr ? 0 : gradient_bytes_[t];
  return bytes;
}

DifferenceSquares DeviceSide::squares(std::uint32_t tensor) const {
  return message_of(tensor).coded->squares(places_[tensor].slot);
}

Status DeviceSide::read_residual(std::uint32_t tensor, std::span<float> residual) {
  return message_of(tensor).work->read_residual(places_[tensor].slot, residual);
}

Status DeviceSide::write_residual(std::uint32_t tensor, std::span<const float> residual) {
  return message_of(tensor).work->write_residual(places_[tensor].slot, residual);
}

}  // namespace cortado
