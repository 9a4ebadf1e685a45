// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "session/placement.h"

#include <string_view>
#include <utility>

#include "collective/agreement.h"
#include "core/check.h"
#include "core/seconds.h"
#include "cortado/calibrate.h"

namespace cortado {

Result<Placement> find_placement(const Result<std::optional<LauncherPlace>>& place, Communicator* communicator,
                                 std::chrono::nanoseconds timeout) {
  const Result<Topology> agreed = agree_on_topology(communicator, place.ok() ? place.value() : std::nullopt, timeout);
  if (agreed.ok()) return Placement{agreed.value(), place.ok() ? "" : place.status().message()};
  // What ranks disagree on, and numbers that can't be: the same error on all of them.
  const StatusCode code = agreed.status().code();
  if (code != StatusCode::kMismatch && code != StatusCode::kInvalidArgument) return agreed.status();
  CORTADO_ASSIGN_OR_RETURN(Topology flat, Topology::two_levels(communicator->world_size(), 1));
  return Placement{std::move(flat), agreed.status().message()};
}

Result<std::optional<Cluster>> given_cluster(const AutoOptions& options, const Topology& topology,
                                             Communicator* communicator) {
  if (options.cluster.empty()) return std::optional<Cluster>();
  const std::chrono::nanoseconds timeout = from_seconds(options.timeout_s);
  CORTADO_ASSIGN_OR_RETURN(const ClusterIdentity identity,
                           cluster_identity(communicator, options.transport_version, timeout));
  // One letter, then the file or the error.
  std::string text;
  if (communicator->rank() == 0) {
    const Result<Cluster> loaded = load_cluster(options.cluster);
    const Status fits = loaded.ok() ? check_cluster_is_of(loaded.value(), identity, topology) : loaded.status();
    const bool is_torch = identity.communicator.starts_with("callback");
    const std::string advice = !loaded.ok() ? ""
                               : is_torch   ? "; measure here with torchrun ... -m cortado.calibrate"
                                            : "; measure here with mpirun ... cortado calibrate";
    text = fits.ok() ? "+" + cluster_to_json(loaded.value()) : "-" + fits.message() + advice;
  }
  CORTADO_ASSIGN_OR_RETURN(text, text_of_rank_0(communicator, text, timeout));
  if (text.front() == '-') {
    return make_error(StatusCode::kMismatch, "cluster=%s: %s", options.cluster.c_str(), text.c_str() + 1);
  }
  CORTADO_ASSIGN_OR_RETURN(Cluster cluster, cluster_from_json(std::string_view(text).substr(1)));
  return std::optional<Cluster>(std::move(cluster));
}

}  // namespace cortado
