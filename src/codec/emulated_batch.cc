// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/device_batch.h"
#include "codec/device_registry.h"
#include "core/device_emulation.h"

namespace cortado {

template Result<std::unique_ptr<DeviceBatch>> make_batch<EmulatedDevice>(std::string_view,
                                                                         std::span<const DeviceTensor>);

}  // namespace cortado
