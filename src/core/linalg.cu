// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/cuda_device.cuh"
#include "core/linalg_device.h"

namespace cortado {

template void CudaDevice::launch(std::int64_t, const BeginBatch&);

}  // namespace cortado
