// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Candidates: what auto tries, best prediction first.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cortado/auto.h"
#include "cortado/cluster.h"
#include "cortado/job.h"
#include "cortado/topology.h"
#include "session/pace.h"

namespace cortado {

// Pieces of gradients, to see what codecs make of them whose payloads vary; none: normal values.
using GradientSamples = std::vector<std::vector<float>>;

// Whether some sample tells: steps that overflow and parameters that are not used say nothing.
bool tell_sizes(const GradientSamples& samples);

// Whether a candidate is a setting whose payloads vary in size.
bool has_varying_payloads(const std::string& what);

// What the dense steps have shown; but for `samples` the same on all ranks.
struct MeasuredSteps {
  std::vector<std::int64_t> ready_ns;  // by tensor: on the last rank, from the end of the last step, if nothing travels
  std::int64_t first_ready_ns = 0;     // when the first gradient was, in the mean of the ranks; 0: not known
  std::int64_t dense_ns = 0;           // of a step; the same on all ranks
  std::int64_t dense_ready_ns = 0;     // when the last gradient is ready, as `ready_ns`, but beside transfers
  std::int64_t dense_first_ready_ns = 0;  // as `first_ready_ns`
  bool keeps_gradients = false;           // StepContext::keeps_local_gradients
  // Of all gradients but those of fp16, as they were handed over, with the loss scale that they carry: the largest
  // magnitude on any rank, in one dense step or two. Inf, if one is not finite.
  double largest_gradient = 0;
  GradientSamples samples;  // of rank 0

  // Over the step in which nothing travels.
  double dense_pace() const { return pace_of(dense_first_ready_ns, first_ready_ns).value_or(1); }
};

struct Candidates {
  std::vector<AutoCandidate> list;  // dense first, with its prediction
  std::vector<std::string> notes;   // what there is to say about it, the same on all ranks
  // On rank 0, where predictions are made: that of a candidate's `what` as it was, from newer samples, for steps of
  // each of these paces.
  std::function<Result<std::vector<std::int64_t>>(const std::string& what, const GradientSamples& samples,
                                                  std::span<const double> paces)>
      predict;
};

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

// What candidates are found for.
struct CandidateRequest {
  const std::vector<EngineTensor>& tensors;
  const AutoOptions& options;
  const Topology& topology;
  const std::optional<Cluster>& cluster;    // given; without one links and codecs are measured
  const std::vector<std::string>& refused;  // settings that lost too much; "plan"
};

// Whether a candidate's `what` may run at the options' quality: it may come from a checkpoint of another one.
bool may_run(const std::string& what, const AutoOptions& options, const std::vector<std::string>& refused);

// How many values of which tensors' gradients tell what codecs make of them: the largest matrices, whole, up to 8 Mi
// values (32 MiB) in all. By tensor. Pure.
std::map<std::uint32_t, std::int64_t> sampled_elems(const std::vector<EngineTensor>& tensors);

// Settings of the options' quality that are not refused, predicted by rank 0, the same on every rank; those that are
// predicted to be slower than dense by more than a tenth are left out, and of the others all but the best kMostTried.
// cast(fp16) is left out, of plans too, where gradients are not far below what fp16 holds. Every rank calls it at the
// same point. Measuring takes about options.measure_s; with 0 nothing is predicted, and all
// settings are candidates.
constexpr int kMostTried = 5;
Result<Candidates> find_candidates(const CandidateRequest& request, const MeasuredSteps& steps,
                                   Communicator* communicator, const Clock* clock);

// `cluster` with the transfers_slow_backward that has the last gradient of a simulated dense step ready when it was in
// those that were measured; the nearest to it, where none has. Pure.
Result<Cluster> with_slowed_backward(const Cluster& cluster, const Job& job, std::int64_t dense_ready_ns,
                                     bool takes_buffers);

// Links are measured in some seconds, with messages smaller than those of training and nothing beside them; what the
// dense steps took tells better how long they are busy. `cluster` as with_slowed_backward() makes it, with all links as
// much slower or faster, by a factor of two at most, as makes the prediction of dense come true; with links as they
// are, where these hardly count. `job`: of a backward pass without transfers. Pure.
Result<Cluster> as_dense_steps_show(const Cluster& cluster, const Job& job, const MeasuredSteps& steps,
                                    bool takes_buffers);

// Texts for the way from rank 0 to the others.
std::string candidates_to_json(const Candidates& candidates);
Result<Candidates> candidates_from_json(const std::string& json);

}  // namespace cortado
