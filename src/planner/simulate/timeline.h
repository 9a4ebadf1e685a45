// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cortado/planner.h"

namespace cortado {

// As simulate_plan(), where engines of settings send the buckets: sizes of payloads that vary travel with the payloads,
// not before them.
Result<Timeline> simulate_messages(const Plan& buckets, const Job& job, const Cluster& cluster);

}  // namespace cortado
