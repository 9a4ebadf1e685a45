// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "engine/emulated_message.h"

#include "core/device_emulation.h"
#include "engine/device_matrices_of.h"
#include "engine/device_message_of.h"

namespace cortado {

Result<std::unique_ptr<DeviceMessage>> make_emulated_message(const DeviceMessage::Setup& setup) {
  return DeviceMessageOf<EmulatedDevice>::make(setup);
}

Result<std::unique_ptr<DeviceMatrices>> make_emulated_matrices(const DeviceMatrices::Setup& setup) {
  return DeviceMatricesOf<EmulatedDevice>::make(setup);
}

}  // namespace cortado
