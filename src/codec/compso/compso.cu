// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/compso/compso_device.h"
#include "core/cuda_device.cuh"

namespace cortado {

template void CompsoPlan::encode(CudaDevice&, const DeviceWorkspace&) const;
template void CompsoPlan::decode(CudaDevice&, const DeviceWorkspace&) const;

}  // namespace cortado
