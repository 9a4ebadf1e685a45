// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "kfac/emulated_kfac_device.h"

#include <cstddef>
#include <utility>
#include <vector>

#include "core/device_emulation.h"
#include "kfac/kfac_device_of.h"

namespace cortado {
namespace {

class LateKfacDevice final : public KfacDeviceOf<EmulatedDevice> {
 public:
  using KfacDeviceOf::KfacDeviceOf;

  Status add_batch(std::size_t slot, const KfacBatch& batch, double scale) override {
    given_.push_back({slot, batch, scale});
    return {};
  }
  void forget_batches() override {
    given_.clear();
    KfacDeviceOf::forget_batches();
  }
  Status fetch_factors() override {
    CORTADO_RETURN_IF_ERROR(read());
    return KfacDeviceOf::fetch_factors();
  }
  Status lead(DeviceStream stream) override {
    CORTADO_RETURN_IF_ERROR(read());
    return KfacDeviceOf::lead(stream);
  }

 private:
  struct Given {
    std::size_t slot;
    KfacBatch batch;
    double scale;
  };

  Status read() {
    for (const Given& each : std::exchange(given_, {})) {
      CORTADO_RETURN_IF_ERROR(KfacDeviceOf::add_batch(each.slot, each.batch, each.scale));
    }
    return {};
  }

  std::vector<Given> given_;
};

}  // namespace

std::shared_ptr<KfacDevice> make_emulated_kfac_device(std::int64_t patch_elems, std::unique_ptr<DeviceQueue> queue,
                                                      std::unique_ptr<DeviceProducts> products,
                                                      std::shared_ptr<KfacInverter> inverter) {
  return std::make_shared<KfacDeviceOf<EmulatedDevice>>(std::move(queue), std::move(products), std::move(inverter),
                                                        patch_elems);
}

std::shared_ptr<KfacDevice> make_late_kfac_device() {
  return std::make_shared<LateKfacDevice>(std::make_unique<EmulatedQueue>(), std::make_unique<EmulatedProducts>(),
                                          make_cpu_inverter(1), 1);
}

}  // namespace cortado
