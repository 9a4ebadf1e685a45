// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "cortado/auto.h"
#include "cortado/cluster.h"
#include "cortado/communicator.h"
#include "cortado/topology.h"

namespace cortado {

// How the ranks sit on machines, for all that is measured and planned.
struct Placement {
  Topology topology;
  std::string note;  // why it is one level in spite of what the launcher has told; or empty
};

// From what the launcher has told this rank (launcher_place()). Where that makes no sense for these ranks together, as
// with a group of some ranks only, or machines with different numbers of them, one level of all: no reason to end a
// training. Every rank calls it.
Result<Placement> find_placement(const Result<std::optional<LauncherPlace>>& place, Communicator* communicator,
                                 std::chrono::nanoseconds timeout);

// The cluster file that the options name, read and checked by rank 0; nothing if they name none. Every rank calls it,
// and gets the same file or the same error.
Result<std::optional<Cluster>> given_cluster(const AutoOptions& options, const Topology& topology,
                                             Communicator* communicator);

}  // namespace cortado
