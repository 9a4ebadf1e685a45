// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include "cortado/status.h"

namespace cortado {

// The codec of a setting alone, without the engine's own parameters: what calibrate() measures and the planner knows.
Result<std::string> codec_of_setting(std::string_view spec);

}  // namespace cortado
