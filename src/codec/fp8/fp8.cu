// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/fp8/fp8_device.h"
#include "core/cuda_device.cuh"

namespace cortado {

template void BlockPlan<Fp8DeviceScheme>::encode(CudaDevice&, const DeviceWorkspace&) const;
template void BlockPlan<Fp8DeviceScheme>::decode(CudaDevice&, const DeviceWorkspace&) const;

}  // namespace cortado
