// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/cuda_device.h"
#include "engine/device_message_of.h"

namespace cortado {

Result<std::unique_ptr<DeviceMessage>> make_cuda_message(const DeviceMessage::Setup& setup) {
  return DeviceMessageOf<CudaDevice>::make(setup);
}

}  // namespace cortado
