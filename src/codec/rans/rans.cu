// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/rans/rans_device.h"
#include "core/cuda_device.cuh"

namespace cortado {

template void RansPlan::encode(CudaDevice&, const DeviceWorkspace&) const;
template void RansPlan::decode(CudaDevice&, const DeviceWorkspace&) const;

}  // namespace cortado
