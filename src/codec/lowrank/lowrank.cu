// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/lowrank/lowrank_device.h"
#include "core/cuda_device.cuh"

namespace cortado {

template void LowRankPlan::encode(CudaDevice&, const DeviceWorkspace&) const;
template void LowRankPlan::decode(CudaDevice&, const DeviceWorkspace&) const;

template void LowRankSteps::project(CudaDevice&, const DeviceWorkspace&, LowRankSide) const;
template void LowRankSteps::orthogonalise(CudaDevice&, const DeviceWorkspace&, LowRankSide) const;
template void LowRankSteps::random_basis(CudaDevice&, const DeviceWorkspace&) const;
template void LowRankSteps::reconstruct(CudaDevice&, const DeviceWorkspace&, float) const;

template void LowRankPasses::project(CudaDevice&, const DeviceWorkspace&, const LowRankEntry*, LowRankSums*) const;
template void LowRankPasses::undo(CudaDevice&, const DeviceWorkspace&, const LowRankEntry*) const;
template void LowRankPasses::reconstruct(CudaDevice&, const DeviceWorkspace&, const LowRankEntry*, float) const;

}  // namespace cortado
