// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What steps with a setting, or a plan, will take: the planner's simulation, fitted to what dense steps took. Pure.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "cortado/auto.h"
#include "cortado/cluster.h"
#include "cortado/engine.h"
#include "cortado/job.h"
#include "cortado/plan.h"
#include "session/pace.h"

namespace cortado {

// Pieces of gradients, to see what codecs make of them whose payloads vary; none: normal values.
using GradientSamples = std::vector<std::vector<float>>;

// Whether some sample tells: steps that overflow and parameters that are not used say nothing.
bool tell_sizes(const GradientSamples& samples);

// Whether a candidate is a setting whose payloads vary in size.
bool has_varying_payloads(const AutoCandidate& candidate);

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

// How many values of which tensors' gradients tell what codecs make of them: the largest matrices, whole, up to 8 Mi
// values (32 MiB) in all. By tensor. Pure.
std::map<std::uint32_t, std::int64_t> sampled_elems(const std::vector<EngineTensor>& tensors);

// The backward pass of these steps, with nothing that travels.
Job job_of_steps(const std::vector<EngineTensor>& tensors, const MeasuredSteps& steps);

// The same at another pace. Computation is the CPU's, and codecs are; links are as fast as they were.
Job at_pace(Job job, double pace);
Cluster at_pace(Cluster cluster, double pace);

// Gradients as engines work in them, and send them, but for buffers that are handed over.
Job in_float32(Job job);

// change(level, curves) for the collectives of every level and every range that was measured, with its outermost level.
template <typename Change>
void change_collectives(Cluster* cluster, Change change) {
  for (ClusterLevel& level : cluster->levels) change(level, level.collectives);
  for (ClusterRange& range : cluster->ranges) {
    change(cluster->levels[static_cast<std::size_t>(range.levels.last)], range.collectives);
  }
}

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

struct Prediction {
  std::int64_t step_ns = 0;
  std::int64_t transfers_ns = 0;  // links are busy
};

// How long steps take, once the dense steps have shown what links and backward pass are like.
struct StepPredictor {
  std::vector<EngineTensor> tensors;
  Job job;
  Cluster cluster;
  bool keeps_gradients = false;
  std::int64_t told_dense_ns = 0;  // what is said of dense: predicted, with links as they were measured
  std::int64_t dense_ns = 0;       // measured; 0: predictions count as they are
  Prediction dense = {};           // of the same step

  // Of a candidate, for steps of each of these paces.
  Result<std::vector<std::int64_t>> predict(const AutoCandidate& candidate, const GradientSamples& samples,
                                            std::span<const double> paces) const;
  Result<std::int64_t> predict_plan(const Plan& plan, double pace) const;

  // What the dense step took beyond its prediction is added in proportion to the time that links are busy; if it took
  // less, all are shortened in proportion.
  std::int64_t fitted_ns(const Prediction& prediction) const;
};

struct PredictorOptions {
  bool takes_buffers = true;  // AutoOptions::takes_buffers
  bool can_average = false;   // AutoOptions::can_average
  bool fits = true;           // to the dense steps; else the cluster counts as it is
};

// `job`: of `steps`, at their pace. `cluster`: as it was measured.
Result<StepPredictor> make_predictor(const std::vector<EngineTensor>& tensors, const Job& job,
                                     const MeasuredSteps& steps, const Cluster& cluster,
                                     const PredictorOptions& options);

}  // namespace cortado
