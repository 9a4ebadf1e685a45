// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/sign/sign_device.h"
#include "core/cuda_device.cuh"

namespace cortado {

template void SignPlan::encode(CudaDevice&, const DeviceWorkspace&) const;
template void SignPlan::decode(CudaDevice&, const DeviceWorkspace&) const;

}  // namespace cortado
