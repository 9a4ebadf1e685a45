// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Curves for lower bounds: nowhere above the measured ones, with a time per unit that does not rise with the size, and
// up to the largest measured size the largest such; with sums of all types as fast as float32's.
#pragma once

#include <optional>

#include "cortado/cluster.h"

namespace cortado {

// Nothing if all curves of the cluster are such already. Collectives that were not measured keep their times.
std::optional<Cluster> relax_curves(const Cluster& cluster);

}  // namespace cortado
