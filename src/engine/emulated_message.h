// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// For tests: messages and matrices whose device is the CPU. In the library cortado_emulation, so that their kernels are
// compiled once for all tests.
#pragma once

#include <memory>

#include "engine/device_matrices.h"
#include "engine/device_message.h"

namespace cortado {

Result<std::unique_ptr<DeviceMessage>> make_emulated_message(const DeviceMessage::Setup& setup);
Result<std::unique_ptr<DeviceMatrices>> make_emulated_matrices(const DeviceMatrices::Setup& setup);

}  // namespace cortado
