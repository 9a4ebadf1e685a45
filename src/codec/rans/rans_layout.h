// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "codec/device_layout.h"
#include "codec/rans/rans_device.h"

namespace cortado {

// Memory for so many messages of so many codes and chunks in all.
RansPlaces make_rans_places(std::int64_t chunk_codes, std::int64_t messages, std::int64_t codes, std::int64_t chunks,
                            DeviceLayout& layout);

// A message for each tensor, with as many codes as it has elements.
RansPlan make_rans_plan(std::int64_t chunk_codes, DeviceLayout& layout);

}  // namespace cortado
