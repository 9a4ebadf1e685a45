// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "collective/scheme_device.h"
#include "core/cuda_device.h"
#include "core/cuda_queue.h"
#include "cortado/cuda.h"

namespace cortado {

namespace {

class CudaSchemeDevice final : public SchemeDeviceOf<CudaDevice> {
 public:
  explicit CudaSchemeDevice(int device) : device_(device) {}

  Result<std::unique_ptr<DeviceQueue>> make_queue() const override { return make_cuda_queue(device_); }
  Result<std::unique_ptr<DeviceBatch>> make_batch(std::string_view spec,
                                                  std::span<const DeviceTensor> tensors) const override {
    return make_cuda_batch(spec, tensors);
  }

 private:
  int device_;
};

}  // namespace

std::shared_ptr<const SchemeDevice> create_cuda_scheme_device(int device) {
  return std::make_shared<const CudaSchemeDevice>(device);
}

}  // namespace cortado
