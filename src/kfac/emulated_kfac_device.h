// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// For tests: a KfacDevice whose device is the CPU, and whose copies to the host are late (emulated_queue.h).
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "core/device_emulation.h"
#include "core/emulated_products.h"
#include "core/emulated_queue.h"
#include "kfac/inverter.h"
#include "kfac/kfac_device_of.h"

namespace cortado {

// The queue is made by the caller who wants to look at it.
inline std::shared_ptr<KfacDevice> make_emulated_kfac_device(
    std::int64_t patch_elems = 1, std::unique_ptr<EmulatedQueue> queue = std::make_unique<EmulatedQueue>()) {
  return std::make_shared<KfacDeviceOf<EmulatedDevice>>(std::move(queue), std::make_unique<EmulatedProducts>(),
                                                        make_cpu_inverter(1), patch_elems);
}

// One that reads batches as late as a device may: when somebody waits for it. What is changed before, or given to
// somebody else, is seen in the factors.
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

inline std::shared_ptr<KfacDevice> make_late_kfac_device() {
  return std::make_shared<LateKfacDevice>(std::make_unique<EmulatedQueue>(), std::make_unique<EmulatedProducts>(),
                                          make_cpu_inverter(1), 1);
}

}  // namespace cortado
