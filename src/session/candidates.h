// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Candidates: what auto tries, best prediction first.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cortado/auto.h"
#include "cortado/cluster.h"
#include "cortado/topology.h"
#include "session/step_prediction.h"

namespace cortado {

struct Candidates {
  std::vector<AutoCandidate> list;  // dense first, with its prediction
  std::vector<std::string> notes;   // what there is to say about it, the same on all ranks
  // On rank 0, where predictions are made: that of a candidate as it was, from newer samples, for steps of
  // each of these paces.
  std::function<Result<std::vector<std::int64_t>>(const AutoCandidate& candidate, const GradientSamples& samples,
                                                  std::span<const double> paces)>
      predict;
};

// What candidates are found for.
struct CandidateRequest {
  const std::vector<EngineTensor>& tensors;
  const AutoOptions& options;
  const Topology& topology;
  const std::optional<Cluster>& cluster;    // given; without one links and codecs are measured
  const std::vector<std::string>& refused;  // settings that lost too much; "plan"
};

// Of a `what`, with its label. Fails where that is the text of a plan that can't be read; specifications are read by
// who runs them.
Result<AutoCandidate> candidate_of(const std::string& what);

// Whether a candidate may run at the options' quality: it may come from a checkpoint of another one.
bool may_run(const AutoCandidate& candidate, const AutoOptions& options, const std::vector<std::string>& refused);

constexpr int kMostTried = 5;

// Settings of the options' quality that are not refused, predicted by rank 0, the same on every rank; those that are
// predicted to be slower than dense by more than a tenth are left out, and of the others all but the best kMostTried.
// cast(fp16) is left out, of plans too, where gradients are not far below what fp16 holds. Every rank calls it at the
// same point. Measuring takes about options.measure_s; with 0 nothing is predicted, and all settings are candidates.
Result<Candidates> find_candidates(const CandidateRequest& request, const MeasuredSteps& steps,
                                   Communicator* communicator, const Clock* clock);

// Texts for the way from rank 0 to the others.
std::string candidates_to_json(const Candidates& candidates);
Result<Candidates> candidates_from_json(const std::string& json);

}  // namespace cortado
