// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// DeviceWork: tensors of one message whose gradients and residuals are on a device, and what DeviceSide asks of all of
// them, be they coded there (DeviceMessage) or projected (DeviceMatrices). Nothing waits for the device but what says
// so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cortado/status.h"

namespace cortado {

// The loss scale that gradients carry.
struct GradientScale {
  double value = 1;
  const float* on_device = nullptr;  // where it lies there in the order of the queue; `value` is not known yet then
};

class DeviceWork {
 public:
  virtual ~DeviceWork() = default;

  virtual int slot_count() const = 0;

  // Before the first step: device memory that holds nothing from one call to the next, so that all work of one queue
  // shares it.
  virtual std::uint64_t scratch_bytes() const = 0;
  virtual Status set_up(std::byte* scratch) = 0;

  // Gives the queue what makes messages of gradients: a pointer to device memory for each slot.
  virtual Status encode(std::span<void* const> gradients, const GradientScale& scale, std::int64_t step) = 0;
  // True once it is on the host. To be asked again and again: the queue may be given more before.
  virtual Result<bool> encoded() = 0;

  // After encode(), before anything that follows on encoded(): the scale that was on the device.
  virtual void know_scale(double value) = 0;

  // Once the verdict is known: gives the queue what makes means of messages. step_finite: no rank's gradient of any
  // tensor was not; then the step becomes the state.
  virtual Status decode(bool step_finite, std::span<const bool> slot_finite) = 0;
  // True once it has been done; what was wrong is said here.
  virtual Result<bool> decoded() = 0;

  // -- between steps; with feedback. Both wait for the queue.
  virtual Status read_residual(int slot, std::span<float> residual) = 0;
  virtual Status write_residual(int slot, std::span<const float> residual) = 0;

  virtual std::int64_t device_bytes() const = 0;  // held
  virtual std::int64_t host_bytes() const = 0;    // of pinned memory
};

}  // namespace cortado
