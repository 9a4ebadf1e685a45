// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/device_batch.h"
#include "codec/device_registry.h"
#include "codec/lowrank/lowrank_batch_of.h"
#include "core/cuda_device.h"

namespace cortado {

template Result<std::unique_ptr<DeviceBatch>> make_batch<CudaDevice>(std::string_view, std::span<const DeviceTensor>);

Result<std::unique_ptr<DeviceBatch>> make_cuda_batch(std::string_view spec, std::span<const DeviceTensor> tensors) {
  return make_batch<CudaDevice>(spec, tensors);
}

Result<std::unique_ptr<LowRankBatch>> make_cuda_low_rank_batch(std::span<const LowRankTensor> tensors) {
  return LowRankBatchOf<CudaDevice>::make(tensors);
}

}  // namespace cortado
