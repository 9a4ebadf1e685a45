// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What the states of all ranks of a checkpoint have in common, as one number.
#pragma once

#include <cstdint>

#include "cortado/engine.h"

namespace cortado {

inline constexpr char kOtherBasis[] = "other_basis";  // PlaceState::name

// Of settings, steps, messages and bases; residuals are a rank's own. States of equal hash keep replicas equal.
std::uint64_t state_hash(const EngineState& state);

}  // namespace cortado
