// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "core/device.h"
#include "core/device_products.h"

namespace cortado {

// By cuBLAS in float32 (TF32 is not used), given to `stream` of the device that is current now and at every call. Used
// by one thread at a time. kUnsupported where there is no device.
Result<std::unique_ptr<DeviceProducts>> make_cuda_products(DeviceStream stream);

}  // namespace cortado
