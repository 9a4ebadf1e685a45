// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The command `cortado calibrate`, run by mpirun. Returns the exit code of the program and says on stderr what went
// wrong.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cortado/status.h"

namespace cortado {
class Communicator;
}

namespace cortado::cli {

struct CalibrateCommand {
  std::string cluster_path;
  std::string name = "calibrated";
  std::vector<std::string> codecs;  // none: those that auto knows
  double budget_s = 50;
  std::string device_library;  // of codecs on each rank's device; empty: none is measured
  bool again = false;          // measures what the file at `cluster_path` already has, too
};

int calibrate_cluster(const CalibrateCommand& command);

struct MpiWorld {
  Communicator* communicator = nullptr;
  std::string version;      // of MPI
  int rank_on_machine = 0;  // among those of its machine
};

// Runs `work` over all ranks of MPI, between MPI_Init and MPI_Finalize; other ranks are ended if it does not return 0.
// Returns what `work` did; where this was built without MPI (no_mpi_world.cc) kUnsupported.
Result<int> with_mpi_world(const std::function<int(const MpiWorld& world)>& work);

}  // namespace cortado::cli
