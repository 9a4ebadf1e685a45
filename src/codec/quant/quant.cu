// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/quant/quant_device.h"
#include "core/cuda_device.cuh"

namespace cortado {

template void BlockPlan<QuantDeviceScheme>::encode(CudaDevice&, const DeviceWorkspace&) const;
template void BlockPlan<QuantDeviceScheme>::decode(CudaDevice&, const DeviceWorkspace&) const;

}  // namespace cortado
