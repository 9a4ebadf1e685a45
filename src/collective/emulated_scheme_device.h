// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// For tests: a SchemeDevice whose device is the CPU, as EmulatedDevice is, and whose copies are late, as those of an
// EmulatedQueue are.
#pragma once

#include <memory>

#include "codec/device_batch.h"
#include "collective/scheme_device.h"
#include "core/device_emulation.h"
#include "core/emulated_queue.h"

namespace cortado {

class EmulatedSchemeDevice : public SchemeDeviceOf<EmulatedDevice> {
 public:
  Result<std::unique_ptr<DeviceQueue>> make_queue() const override {
    return std::unique_ptr<DeviceQueue>(std::make_unique<EmulatedQueue>());
  }
  Result<std::unique_ptr<DeviceBatch>> make_batch(std::string_view spec,
                                                  std::span<const DeviceTensor> tensors) const override {
    return cortado::make_batch<EmulatedDevice>(spec, tensors);
  }
};

}  // namespace cortado
