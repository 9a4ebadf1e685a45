// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/cast/cast_device.h"
#include "core/cuda_device.cuh"

namespace cortado {

template void CastPlan::encode(CudaDevice&, const DeviceWorkspace&) const;
template void CastPlan::decode(CudaDevice&, const DeviceWorkspace&) const;

}  // namespace cortado
