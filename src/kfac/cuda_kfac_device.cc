// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <utility>

#include "core/check.h"
#include "core/cuda_device.h"
#include "core/cuda_products.h"
#include "core/cuda_queue.h"
#include "cortado/kfac_cuda.h"
#include "kfac/kfac_device_of.h"

namespace cortado {

namespace {

// make_cuda_inverter() on one device, whichever is current.
class InverterOfDevice final : public KfacInverter {
 public:
  InverterOfDevice(std::shared_ptr<KfacInverter> inverter, int device)
      : inverter_(std::move(inverter)), device_(device) {}

  Status reserve(std::span<const InverseJob> jobs) override {
    set_current_cuda_device(device_);
    return inverter_->reserve(jobs);
  }
  Status invert(std::span<InverseJob> jobs, std::chrono::nanoseconds timeout) override {
    set_current_cuda_device(device_);
    return inverter_->invert(jobs, timeout);
  }
  std::int64_t scratch_bytes() const override { return inverter_->scratch_bytes(); }

 private:
  std::shared_ptr<KfacInverter> inverter_;
  int device_;
};

}  // namespace

Result<std::shared_ptr<KfacDevice>> make_cuda_kfac_device(int device) {
  if (cuda_device_count() == 0) return make_error(StatusCode::kUnsupported, "there is no CUDA device");
  CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<DeviceQueue> queue, make_cuda_queue(device));  // and makes it current
  CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<DeviceProducts> products, make_cuda_products(queue->stream()));
  CORTADO_ASSIGN_OR_RETURN(std::shared_ptr<KfacInverter> inverter, make_cuda_inverter());
  return std::shared_ptr<KfacDevice>(std::make_shared<KfacDeviceOf<CudaDevice>>(
      std::move(queue), std::move(products), std::make_shared<InverterOfDevice>(std::move(inverter), device)));
}

}  // namespace cortado
