// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The commands `cortado plan` and `cortado simulate`. Each returns the exit code of the program and says on stderr what
// went wrong.
#pragma once

#include <string>
#include <vector>

#include "cortado/planner.h"

namespace cortado::cli {

struct PlanOptions {
  std::string job_path, cluster_path;
  std::string plan_path;  // empty: not written
  PlannerConstraints constraints;
  std::string strategy = "cortado";
  std::string quality;  // codecs that auto may use at it; empty: no such limit
  bool explain = false;
  std::string html_path, trace_path;  // of the report, and of a measured trace to compare with; empty: none
};

struct SimulateOptions {
  std::string plan_path, job_path, cluster_path;
  std::string trace_path;  // empty: not written
  int width = 100;
};

int make_plan_file(const PlanOptions& options);
int simulate_plan_file(const SimulateOptions& options);

}  // namespace cortado::cli
