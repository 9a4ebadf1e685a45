// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/cuda_device.cuh"
#include "kfac/triangle_device.h"

namespace cortado {

template void CudaDevice::launch(std::int64_t, const ExpandTriangles&);
template void CudaDevice::launch(std::int64_t, const MirrorMatrices&);

}  // namespace cortado
