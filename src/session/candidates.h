// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Candidates: what auto tries, best prediction first.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cortado/auto.h"
#include "cortado/cluster.h"

namespace cortado {

// What the dense steps have shown on this rank.
struct MeasuredSteps {
  std::vector<std::int64_t> ready_ns;  // by tensor, from the end of the step before
  std::int64_t dense_ns = 0;           // of a step; the same on all ranks
};

struct Candidates {
  std::vector<AutoCandidate> list;  // dense first, with its prediction
  std::vector<std::string> notes;   // what there is to say about it, the same on all ranks
};

// The cluster file that the options name, read and checked by rank 0; nothing if they name none. Every rank calls it,
// and gets the same file or the same error.
Result<std::optional<Cluster>> given_cluster(const AutoOptions& options, Communicator* communicator);

// Settings of `options.quality` that are not `refused`, predicted by rank 0, the same on every rank; those that are
// predicted to be slower than dense by more than a tenth are left out, and of the others all but the best kMostTried.
// Every rank calls it at the same point. Without a cluster file links and codecs are measured, for about
// options.measure_s; with 0 nothing is predicted, and all settings are candidates.
constexpr int kMostTried = 5;
Result<Candidates> find_candidates(const std::vector<EngineTensor>& tensors, const MeasuredSteps& steps,
                                   const AutoOptions& options, const std::optional<Cluster>& given,
                                   const std::vector<std::string>& refused, Communicator* communicator,
                                   const Clock* clock);

// Texts for the way from rank 0 to the others.
std::string candidates_to_json(const Candidates& candidates);
Result<Candidates> candidates_from_json(const std::string& json);

}  // namespace cortado
