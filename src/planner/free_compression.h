// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cortado/planner.h"

namespace cortado {

// What the step would take if compression cost nothing: the shortest of the plan found where codecs and copies take no
// time, of `plan` there, and of `plan` as it is (Espresso, section 5.5: the upper bound of any compression).
Result<std::int64_t> free_compression_ns(const Plan& plan, const Job& job, const Cluster& cluster,
                                         const PlannerConstraints& constraints);

}  // namespace cortado
