// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/randk/randk_device.h"
#include "core/cuda_device.cuh"

namespace cortado {

template void RandkPlan::encode(CudaDevice&, const DeviceWorkspace&) const;
template void RandkPlan::decode(CudaDevice&, const DeviceWorkspace&) const;

}  // namespace cortado
