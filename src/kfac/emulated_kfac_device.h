// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// For tests: a KfacDevice whose device is the CPU, and whose copies to the host are late (emulated_queue.h). In the
// library cortado_emulation, so that its kernels are compiled once for all tests.
#pragma once

#include <cstdint>
#include <memory>

#include "core/emulated_products.h"
#include "core/emulated_queue.h"
#include "kfac/inverter.h"
#include "kfac/kfac_device.h"

namespace cortado {

// Parts are made by the caller who wants to look at them.
std::shared_ptr<KfacDevice> make_emulated_kfac_device(
    std::int64_t patch_elems = 1, std::unique_ptr<DeviceQueue> queue = std::make_unique<EmulatedQueue>(),
    std::unique_ptr<DeviceProducts> products = std::make_unique<EmulatedProducts>(),
    std::shared_ptr<KfacInverter> inverter = make_cpu_inverter(1));

// One that reads batches as late as a device may: when somebody waits for it. What is changed before, or given to
// somebody else, is seen in the factors.
std::shared_ptr<KfacDevice> make_late_kfac_device();

}  // namespace cortado
