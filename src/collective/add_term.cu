// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "collective/add_term.h"
#include "core/cuda_device.cuh"

namespace cortado {

template void CudaDevice::launch(std::int64_t, const AddTerm&);

}  // namespace cortado
