// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Whether a state holds what a step may: Inf and NaN would stay in residuals, and reach all ranks.
#pragma once

#include "cortado/engine.h"

namespace cortado {

// kMismatch with the tensor and what of it is not finite.
Status check_finite(const EngineState& state);

}  // namespace cortado
