// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What the engine does if gradients are on a device. Work is given to its queue by submit() and finish_step(); what
// comes back is taken in by either, when it is there, and goes the way of everything that is encoded on the CPU.
// finish_step() waits for what is left, as it does for peers.
#include <cstring>
#include <limits>

#include "collective/device_wait.h"
#include "core/check.h"
#include "core/hash.h"
#include "engine/engine_impl.h"

namespace cortado {

using Method = EngineOptions::Method;

// ---- set-up --------------------------------------------------------------------------------------------------------

Status EngineImpl::open_device(EngineDevice device) {
  if (options_.method == Method::kNone) {
    return make_error(StatusCode::kUnsupported,
                      "codec none sends the caller's own buffers, which are on a device here; cast(bf16) halves them");
  }
  if (passes_through()) return {};
  std::vector<std::int64_t> bytes;
  for (const EngineTensor& tensor : tensors_) bytes.push_back(tensor.size_bytes());
  device_ = std::make_unique<DeviceSide>(std::move(device), std::move(bytes));
  if (codec_.feedback == EngineOptions::Feedback::kDgc) device_fallback_ = "feedback=dgc";
  const bool is_low_rank = options_.method == Method::kAcp || options_.method == Method::kPower;
  if (is_low_rank && is_exact()) device_fallback_ = "rollback=exact of a low-rank codec";
  if (!is_low_rank && options_.method != Method::kCodec) {
    device_fallback_ = "all that \"" + options_.to_spec() + "\" sends is dense";
  }
  for (const Message& message : first_->layout().messages) {
    if (!device_fallback_.empty()) break;
    const Status status = is_low_rank ? add_device_matrices(message) : add_device_message(message);
    if (status.code() == StatusCode::kUnsupported) {
      device_fallback_ = status.message();
    } else if (!status.ok()) {
      return status;
    }
  }
  arrived_.reserve(tensors_.size());
  return device_->allocate(/*all=*/in_warm_up());
}

Status EngineImpl::add_device_message(const Message& message) {
  DeviceMessage::Setup setup{.codec = codec_.codec->spec(),
                             .tensors = {},
                             .world_size = communicator_->world_size(),
                             .rank = communicator_->rank(),
                             .has_feedback = codec_.has_feedback(),
                             .is_exact = is_exact(),
                             .seed = codec_seed(),
                             .timeout_s = options_.timeout_s};
  std::vector<std::uint32_t> tensors;
  for (const Slot& slot : message.slots) {
    if (codec_tensors_[slot.tensor] == nullptr) continue;
    const EngineTensor& tensor = tensors_[slot.tensor];
    tensors.push_back(slot.tensor);
    setup.tensors.push_back({.name = tensor.name,
                             .rows = tensor.rows,
                             .cols = tensor.cols,
                             .dtype = tensor.dtype,
                             .encoded = treatments_[slot.tensor].encoded,
                             .number = fnv1a_64(tensor.name)});
  }
  return tensors.empty() ? Status() : device_->add_message(setup, std::move(tensors));
}

// Where sides alternate, the other layout may put them into other messages; together on the device they stay.
Status EngineImpl::add_device_matrices(const Message& message) {
  DeviceMatrices::Setup setup{.tensors = {}, .has_feedback = has_feedback(), .timeout_s = options_.timeout_s};
  std::vector<std::uint32_t> tensors;
  for (const Slot& slot : message.slots) {
    if (low_rank_[slot.tensor] == nullptr) continue;
    tensors.push_back(slot.tensor);
    setup.tensors.push_back(low_rank_[slot.tensor].get());
    if (has_feedback()) low_rank_[slot.tensor]->keep_residual_elsewhere();
  }
  return tensors.empty() ? Status() : device_->add_matrices(setup, std::move(tensors));
}

// ---- a step --------------------------------------------------------------------------------------------------------

Status EngineImpl::begin_step_on_device() {
  context_.keeps_local_gradients = false;  // what decoding overwrites is a copy
  for (std::uint32_t t = 0; t < tensors_.size() && warm_up_ == nullptr; ++t) {
    if (!is_factored_on_device(t)) continue;
    device_->matrices_of(t).set_kind(device_->slot_of(t), first_->find_slot(t)->kind);
  }
  const Status status = device_->begin_step(
      {.value = context_.gradient_scale, .on_device = static_cast<const float*>(context_.device_gradient_scale)},
      phase_step_, warm_up_ != nullptr, static_cast<DeviceStream>(context_.device_stream));
  return status.ok() ? status : fail(status.with_context("to the device"));
}

Status EngineImpl::submit_on_device(std::span<const Gradient> gradients) {
  if (const Status status = device_->submit(gradients); !status.ok()) return fail(status.with_context("submit"));
  return take_from_device();
}

// Starts what became complete, and absorbs what has arrived from peers, in any case.
Status EngineImpl::take_from_device() {
  arrived_.clear();
  for (;;) {
    const Result<const DeviceSide::Arrival*> next = device_->next();
    if (!next.ok()) return fail(next.status().with_context("from the device"));
    if (next.value() == nullptr) break;
    const DeviceSide::Arrival& arrival = *next.value();
    CORTADO_RETURN_IF_ERROR(know_gradient_scale());
    for (const std::uint32_t t : arrival.on_host) {
      submitted_[t].data = device_->host_copy(t);
      arrived_.push_back({t, submitted_[t].data});
    }
    if (arrival.message < 0) continue;
    if (!device_->is_coded(arrival.message)) {
      write_factors(arrival);
      continue;
    }
    for (const std::uint32_t t : device_->tensors_of(arrival.message)) {
      steps_[t].held = context_.holds_zero_gradients && !device_->has_gradient(t);
      if (steps_[t].held) {
        if (const Status status = encode_payload(t, *first_); !status.ok()) return fail(status);
      } else {
        const std::span<const std::byte> sent = codec_.is_summed ? device_->values(t) : device_->payload(t);
        std::byte* const slot = first_->slot_bytes(t).data();
        std::memcpy(slot, sent.data(), sent.size());
        steps_[t].payload_bytes = sent.size();
        steps_[t].finite = device_->finite(t);
        if (codec_.is_summed && !steps_[t].finite) {  // as SummedTensor says it
          const float nan = std::numeric_limits<float>::quiet_NaN();
          std::memcpy(slot, &nan, sizeof(nan));
        }
      }
      first_->mark_written(t, steps_[t].finite, steps_[t].payload_bytes);
    }
  }
  CORTADO_RETURN_IF_ERROR(encode_and_start(arrived_));
  if (second_ == nullptr || warm_up_ != nullptr) return {};
  const Status status = second_->start_ready();
  return status.ok() ? status : fail(status);
}

Status EngineImpl::know_gradient_scale() {
  if (context_.device_gradient_scale == nullptr) return {};
  context_.gradient_scale = device_->gradient_scale();
  const Status status = check_gradient_scale("on the device", context_.gradient_scale);
  return status.ok() ? status : fail(status);
}

void EngineImpl::write_factors(const DeviceSide::Arrival& arrival) {
  Round& round = arrival.is_second ? *second_ : *first_;
  const std::vector<std::uint32_t>& tensors = device_->tensors_of(arrival.message);
  pool_.parallel_for(static_cast<std::int64_t>(tensors.size()), [&](std::int64_t i) {
    const std::uint32_t t = tensors[static_cast<std::size_t>(i)];
    steps_[t].finite =
        device_->matrices_of(t).write(device_->slot_of(t), context_.holds_zero_gradients, round.slot_data(t));
  });
  for (const std::uint32_t t : tensors) round.mark_written(t, steps_[t].finite);
}

// The second round's factors of what message `message` of the first one has brought.
Status EngineImpl::encode_second_round_on_device(int message) {
  for (const Slot& slot : first_->layout().messages[message].slots) {
    if (slot.kind == SlotKind::kDense) continue;
    const Status status = device_->encode_second_round(slot.tensor);
    if (!status.ok()) return fail(status.with_context("the second round"));
    break;  // one stands for all of the message
  }
  return take_from_device();
}

Status EngineImpl::wait_for_arrivals() {
  DeviceWait wait(communicator_, clock_, timeout(), "computed its gradients");
  Interval interval{.start_ns = clock_->now_ns()};
  interval.end_ns = interval.start_ns;
  for (;;) {
    CORTADO_RETURN_IF_ERROR(take_from_device());
    if (!device_->awaits()) break;
    const std::int64_t pause_ns = clock_->now_ns();
    if (const Status status = wait.pause(); !status.ok()) return fail(status);
    interval.end_ns += clock_->now_ns() - pause_ns;  // of the pauses alone: the rest is recorded as what it is
  }
  if (interval.end_ns > interval.start_ns) record(Stage::kWait, -1, -1, interval, 0);
  return wait_until_finished();  // all of it was given before what has just arrived
}

Status EngineImpl::finish_on_device() {
  const Status status = device_->finish_step(
      finite_, [this](std::uint32_t tensor) { return steps_[tensor].finite_on_all; }, context_.holds_zero_gradients);
  return status.ok() ? status : fail(status.with_context("to the device"));
}

// Until the device has decoded the last step.
Status EngineImpl::wait_until_finished() {
  DeviceWait wait(communicator_, clock_, timeout(), "decoded the step");
  for (;;) {
    const Result<bool> finished = device_->finished();
    if (!finished.ok()) return fail(finished.status().with_context("the step before"));
    if (finished.value()) return {};
    if (const Status status = wait.pause(); !status.ok()) return fail(status);
  }
}

}  // namespace cortado
