// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/float_rans/float_rans_device.h"
#include "core/cuda_device.cuh"

namespace cortado {

template void FloatRansPlan::encode(CudaDevice&, const DeviceWorkspace&) const;
template void FloatRansPlan::decode(CudaDevice&, const DeviceWorkspace&) const;

}  // namespace cortado
