// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cli/calibrate_command.h"

namespace cortado::cli {

Result<int> with_mpi_world(const std::function<int(const MpiWorld& world)>&) {
  return Status(StatusCode::kUnsupported, "this program was built without MPI");
}

}  // namespace cortado::cli
