// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/cuda_device.cuh"
#include "kfac/factor_device.h"
#include "kfac/precondition_device.h"

namespace cortado {

template void CudaDevice::launch(std::int64_t, const CopyRows&);
template void CudaDevice::launch(std::int64_t, const CopyPatches&);
template void CudaDevice::launch(std::int64_t, const PackTriangles&);
template void CudaDevice::launch(std::int64_t, const LoadGradient&);
template void CudaDevice::launch(std::int64_t, const StoreGradient&);
template void CudaDevice::launch(std::int64_t, const DivideByEigenvalues&);
template void CudaDevice::launch(std::int64_t, const InnerProducts&);

}  // namespace cortado
