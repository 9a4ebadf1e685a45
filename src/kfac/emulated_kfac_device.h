// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// For tests: a KfacDevice whose device is the CPU, and whose copies to the host are late (emulated_queue.h).
#pragma once

#include <memory>

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

}  // namespace cortado
