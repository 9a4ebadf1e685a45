// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/topk/topk_device.h"
#include "core/cuda_device.cuh"

namespace cortado {

template void TopkPlan::encode(CudaDevice&, const DeviceWorkspace&) const;
template void TopkPlan::decode(CudaDevice&, const DeviceWorkspace&) const;

}  // namespace cortado
