// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "planner/free_compression.h"

#include <algorithm>

#include "core/check.h"

namespace cortado {

Result<std::int64_t> free_compression_ns(const Plan& plan, const Job& job, const Cluster& cluster,
                                         const PlannerConstraints& constraints) {
  Cluster free = cluster;
  for (CodecTimes& times : free.codecs) std::fill(times.curve.times_ns.begin(), times.curve.times_ns.end(), 0);
  free.host_to_device = free.device_to_host = {};
  CORTADO_ASSIGN_OR_RETURN(const Plan found, make_plan(job, free, constraints));
  CORTADO_ASSIGN_OR_RETURN(const Timeline timeline, simulate_plan(plan, job, free));
  // Where resources serve in the order of readiness, less work may even take longer.
  return std::min({found.predicted_step_ns, timeline.step_ns, plan.predicted_step_ns});
}

}  // namespace cortado
