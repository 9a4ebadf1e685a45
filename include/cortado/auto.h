// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Auto: an engine that decides by itself how gradients travel. It runs dense while it measures the job and the links,
// lets the planner predict what the allowed settings would take, tries the best few of them for some steps each, goes
// on with the fastest, or dense where none is faster by enough, and keeps watching (docs/auto.md).
//
// Every decision is made from numbers that all ranks share, at a step that all ranks share.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cortado/cluster.h"
#include "cortado/engine.h"
#include "cortado/plan.h"
#include "cortado/status.h"

namespace cortado {

// What auto may use.
//   kSafe        dense and casts, to fp16 where gradients are far below what that holds
//   kBalanced    also the settings whose final loss was within noise of dense training on two tasks of this repository
//   kAggressive  all that it knows
enum class Quality : std::uint8_t { kSafe, kBalanced, kAggressive };

std::string_view quality_name(Quality quality);  // "safe" ...

// A setting that auto knows, and from which quality on it may be used.
struct AutoSetting {
  std::string spec;      // as for EngineOptions::parse
  Quality quality;       // the most careful one that allows it
  std::string evidence;  // why it may be used there
};
const std::vector<AutoSetting>& auto_settings();

// Their codecs, for calibrate().
std::vector<std::string> auto_codecs(Quality quality);

// Those of them that auto makes plans of. Of plans there is evidence for casts only: settings leave vectors alone,
// plans need not. Low rank has warm starts that plans do not keep.
std::vector<std::string> auto_plan_codecs(Quality quality);

// Those of auto(...), but for cluster=FILE.
const std::vector<Parameter>& auto_parameters();

struct AutoOptions {
  Quality quality = Quality::kBalanced;
  std::string cluster;               // path of a cortado.cluster/1 file to use; empty: links and codecs are measured
  double min_gain = 0.03;            // a setting must be by this share of dense's step time faster than dense
  double measure_s = 8;              // for the links and codecs; they are measured between two steps
  double drift = 0.3;                // measured again beyond 1 + drift times what a step took, up or down
  double max_relative_error = 0.99;  // steps back beyond: what a step loses of gradient and residual (L2; casts: 0.05)
  double max_residual = 100;         // or the residual's norm, in gradients
  std::uint64_t random_seed = 0;
  double timeout_s = 1800;

  std::string transport_version;  // of what is behind the communicator, as for calibrate(): "torch 2.13.0"

  // False: gradients come tensor by tensor (submit()), not in buffers that may be summed as a whole (submit_buffer()).
  bool takes_buffers = true;

  // True: the caller can average gradients by itself, and does in dense steps once they are not measured any more
  // (AutoEngine::may_pass()).
  bool can_average = false;

  // "auto" or "auto(quality=safe, cluster=cluster.json)". Errors name the parameter, the value and what was expected.
  static Result<AutoOptions> parse(std::string_view spec);
  std::string to_spec() const;
};

// Whether `spec` begins as one of auto.
bool is_auto_spec(std::string_view spec);

// A setting in the comparison. Times: -1 is unknown.
struct AutoCandidate {
  std::string label;              // "dense", "cast(bf16)", "plan(hash=..., buckets=...)"
  std::string what;               // a specification, or the JSON text of a plan
  std::optional<Plan> plan = {};  // the latter, read
  // Of a step, by the planner. Of what was tried: said right before the steps of each of its trials that count, in the
  // median of the trials; simulated for a machine as fast as it was in the last steps and in the trials so far, times
  // what the other settings tried took over what was simulated of them. Of dense, and of what was not tried: for the
  // speed in dense steps.
  std::int64_t predicted_ns = -1;
  // From the decision on: the same without what other settings took. -1 of dense, of what was not tried or not
  // predicted, and once it has been tried again.
  std::int64_t simulated_ns = -1;
  std::int64_t measured_ns = -1;  // median of the steps it was tried
  // How long it was in these from the end of a step to the first gradients of the next one (optimizer, forward pass),
  // over what the prediction expects of that: above 1 the machine was slower. And the prediction for steps of that
  // pace: that part of them has been measured, the rest is predicted. 0 and -1 as simulated_ns, and where the pace is
  // not known.
  double pace = 0;
  std::int64_t predicted_at_pace_ns = -1;
  std::int64_t steps = 0;                    // tried
  std::vector<std::int64_t> trials_ns = {};  // median of the steps of each trial; of dense without its first steps
};

struct AutoDecision {
  bool decided = false;   // false: still measuring
  std::int64_t step = 0;  // of the decision
  int chosen = 0;         // of candidates; 0 is dense
  std::vector<AutoCandidate> candidates;
  std::string reason;                       // one sentence
  std::int64_t step_ns = -1;                // of the last comparison: what a step takes now; -1: not compared yet
  double drift = 0;                         // of the last comparison: that over what was measured on trial, less 1
  double relative_error = 0, residual = 0;  // of the last comparison: the largest of any rank
};

class AutoEngine : public Engine {
 public:
  // Every rank calls it, with equal options. `communicator` and `clock` must outlive the engine.
  static Result<std::unique_ptr<AutoEngine>> create(std::vector<EngineTensor> tensors, const AutoOptions& options,
                                                    Communicator* communicator, const Clock* clock = steady_clock());

  // Of the next step, with `can_average`; the same on all ranks. True: it is dense, and nothing is owed to its
  // gradients. The caller averages them by itself, and afterwards calls pass_step() in place of begin_step() to
  // finish_step(). Such steps count and are timed as others: with a dense step that costs nothing settings on trial are
  // compared, and it goes on being watched.
  virtual bool may_pass() const = 0;

  // The step ends now. Waits for the other ranks now and then, as finish_step() does.
  virtual Status pass_step() = 0;

  virtual const AutoDecision& decision() const = 0;

  // What there is to say since the last call, a line each; the same on all ranks.
  virtual std::vector<std::string> take_news() = 0;

  // "auto(quality=safe): cast(bf16)".
  virtual std::string summary() const = 0;
};

}  // namespace cortado
