// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/cuda_device.h"
#include "engine/device_matrices_of.h"
#include "engine/device_message_of.h"

namespace cortado {

Result<std::unique_ptr<DeviceMessage>> make_cuda_message(const DeviceMessage::Setup& setup) {
  return DeviceMessageOf<CudaDevice>::make(setup);
}

Result<std::unique_ptr<DeviceMatrices>> make_cuda_matrices(const DeviceMatrices::Setup& setup) {
  return DeviceMatricesOf<CudaDevice>::make(setup);
}

}  // namespace cortado
