// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "session/candidates.h"

#include <algorithm>
#include <span>
#include <utility>

#include "collective/agreement.h"
#include "core/check.h"
#include "core/format.h"
#include "core/seconds.h"
#include "cortado/calibrate.h"
#include "cortado/planner.h"
#include "engine/plan_engine.h"
#include "session/settings.h"

namespace cortado {

namespace {

constexpr double kHopeless = 1.1;  // times dense, as predicted
// What travels in fp16 is gradients divided by the number of ranks before they are rounded, and sums of these: none is
// larger than the largest gradient of any rank. That may grow by this factor in steps to come.
constexpr double kLargestFloat16 = 65504, kMayGrow = 64;

std::chrono::nanoseconds timeout_of(const AutoOptions& options) { return from_seconds(options.timeout_s); }

std::vector<AutoSetting> allowed_settings(const AutoOptions& options, const std::vector<std::string>& refused) {
  std::vector<AutoSetting> allowed;
  for (const AutoSetting& setting : auto_settings()) {
    const bool is_refused = std::find(refused.begin(), refused.end(), setting.spec) != refused.end();
    if (setting.quality <= options.quality && !is_refused) allowed.push_back(setting);
  }
  return allowed;
}

// What a plan may encode with.
std::vector<std::string> codecs_for_plans(const AutoOptions& options, const std::vector<std::string>& refused) {
  std::vector<std::string> codecs;
  if (std::find(refused.begin(), refused.end(), "plan") != refused.end()) return codecs;
  const std::vector<std::string> of_plans = auto_plan_codecs(options.quality);
  for (const AutoSetting& setting : allowed_settings(options, refused)) {
    const std::string codec = codec_of_setting(setting.spec).value();
    if (std::find(of_plans.begin(), of_plans.end(), codec) != of_plans.end()) codecs.push_back(codec);
  }
  return codecs;
}

// The planner's own plan, if it encodes anything.
Result<std::optional<AutoCandidate>> best_plan(const StepPredictor& predictor, const std::vector<std::string>& codecs) {
  PlannerConstraints constraints;
  constraints.allowed_codecs = codecs;
  constraints.max_lossy_passes = 1;  // as the settings
  CORTADO_ASSIGN_OR_RETURN(Plan plan, make_plan(in_float32(predictor.job), predictor.cluster, constraints));
  const bool encodes = std::any_of(plan.buckets.begin(), plan.buckets.end(),
                                   [](const PlanBucket& bucket) { return bucket.option.encodes() > 0; });
  if (!encodes) return std::optional<AutoCandidate>();
  CORTADO_ASSIGN_OR_RETURN(const std::int64_t predicted_ns, predictor.predict_plan(plan, /*pace=*/1));
  CORTADO_ASSIGN_OR_RETURN(AutoCandidate candidate, candidate_of(plan_to_json(plan)));
  candidate.predicted_ns = predicted_ns;
  return std::optional(std::move(candidate));
}

// Payloads whose sizes vary travel behind their sizes in a plan, and beside them in the engine of a setting. On several
// levels a plan may make that good.
bool may_pay_in_plans(const std::string& codec, const Cluster& cluster) {
  const Result<std::unique_ptr<Codec>> made = make_codec(codec);
  return cluster.levels.size() > 1 || (made.ok() && made.value()->row().traits.fixed_size);
}

// On rank 0: predictions for `candidates`; and the planner's plan, if it encodes anything.
Status add_predictions(const CandidateRequest& request, const Job& job, const MeasuredSteps& steps,
                       const Cluster& cluster, Candidates* candidates) {
  const AutoOptions& options = request.options;
  // A file was measured with more time, and perhaps for other plans: it counts as it is.
  const PredictorOptions predicting{
      .takes_buffers = options.takes_buffers, .can_average = options.can_average, .fits = !request.cluster.has_value()};
  CORTADO_ASSIGN_OR_RETURN(const StepPredictor predictor,
                           make_predictor(request.tensors, job, steps, cluster, predicting));
  candidates->list[0].predicted_ns = predictor.told_dense_ns;
  for (AutoCandidate& candidate : std::span(candidates->list).subspan(1)) {
    const double as_dense[] = {1};
    const Result<std::vector<std::int64_t>> predicted_ns = predictor.predict(candidate, steps.samples, as_dense);
    if (predicted_ns.ok()) {
      candidate.predicted_ns = predicted_ns.value()[0];
    } else {  // a cluster file may have no times of this codec
      candidates->notes.push_back("auto has no prediction of " + candidate.label + ", which is tried only after the " +
                                  "others: " + predicted_ns.status().message());
    }
  }
  candidates->predict = [predictor](const AutoCandidate& candidate, const GradientSamples& samples,
                                    std::span<const double> paces) {
    return predictor.predict(candidate, samples, paces);
  };
  std::vector<std::string> codecs = codecs_for_plans(options, request.refused);
  std::erase_if(codecs, [&](const std::string& codec) { return !may_pay_in_plans(codec, cluster); });
  if (codecs.empty()) return {};
  Result<std::optional<AutoCandidate>> planned = best_plan(predictor, codecs);
  if (!planned.ok()) {
    candidates->notes.push_back("auto has no plan to try: " + planned.status().message());
  } else if (planned.value().has_value()) {
    candidates->list.push_back(*std::move(planned).value());
  }
  return {};
}

Result<Cluster> measure_cluster(const AutoOptions& options, const Topology& topology, Communicator* communicator,
                                const Clock* clock) {
  // First what settings travel by, as later ones may find the time spent. Where all ranks are on one level, ways of two
  // collectives send as many bytes as one does, and the second one can't begin while the backward pass runs.
  std::vector<OpKind> collectives = {OpKind::kAllReduce, OpKind::kAllGather};
  std::vector<OpKind> others = {OpKind::kReduce, OpKind::kBroadcast, OpKind::kGather};
  std::vector<OpKind>& halves = topology.levels.size() > 1 ? collectives : others;
  halves.insert(halves.end(), {OpKind::kReduceScatter, OpKind::kAllToAll});
  CalibrateOptions calibration{.name = "as measured by auto",
                               .codecs = auto_codecs(options.quality),
                               .collectives = std::move(collectives),
                               .contention = false,
                               .budget_s = options.measure_s,
                               .topology = topology,
                               .transport_version = options.transport_version,
                               .timeout_s = options.timeout_s,
                               .progress = nullptr};
  CORTADO_ASSIGN_OR_RETURN(Cluster cluster, calibrate(communicator, calibration, clock));
  // Collectives with a root are not worth the time to measure them, and formulas for them promise too much.
  change_collectives(&cluster, [&](const ClusterLevel&, CollectiveCurves& curves) {
    for (const OpKind kind : others) curves[kind] = {.sizes = {1}, .times_ns = {kMaxNs / 1024}};
  });
  return cluster;
}

// Best first, dense where it is, those without a prediction last; without those that can't win.
void keep_promising(std::int64_t dense_ns, Candidates* candidates) {
  std::vector<AutoCandidate>& list = candidates->list;
  const auto is_hopeless = [&](const AutoCandidate& candidate) {
    return static_cast<double>(candidate.predicted_ns) > kHopeless * static_cast<double>(dense_ns);
  };
  list.erase(std::remove_if(list.begin() + 1, list.end(), is_hopeless), list.end());
  const auto key = [](const AutoCandidate& of) { return std::pair(of.predicted_ns < 0, of.predicted_ns); };
  std::stable_sort(list.begin() + 1, list.end(),
                   [&](const AutoCandidate& a, const AutoCandidate& b) { return key(a) < key(b); });
  if (list.size() > kMostTried + 1) list.resize(kMostTried + 1);
}

}  // namespace

Result<AutoCandidate> candidate_of(const std::string& what) {
  if (!what.starts_with('{')) return AutoCandidate{.label = what == "none" ? "dense" : what, .what = what};
  CORTADO_ASSIGN_OR_RETURN(Plan plan, plan_from_json(what));
  const std::string label = plan_summary(plan);
  return AutoCandidate{.label = label, .what = what, .plan = std::move(plan)};
}

bool may_run(const AutoCandidate& candidate, const AutoOptions& options, const std::vector<std::string>& refused) {
  if (candidate.what == "none") return true;
  if (!candidate.plan.has_value()) {
    const std::vector<AutoSetting> allowed = allowed_settings(options, refused);
    return std::any_of(allowed.begin(), allowed.end(),
                       [&](const AutoSetting& setting) { return setting.spec == candidate.what; });
  }
  const std::vector<PlanBucket>& buckets = candidate.plan->buckets;
  const std::vector<std::string> codecs = codecs_for_plans(options, refused);
  return std::all_of(buckets.begin(), buckets.end(), [&](const PlanBucket& bucket) {
    return bucket.option.encodes() == 0 || std::find(codecs.begin(), codecs.end(), bucket.codec) != codecs.end();
  });
}

Result<Candidates> find_candidates(const CandidateRequest& request, const MeasuredSteps& steps,
                                   Communicator* communicator, const Clock* clock) {
  const AutoOptions& options = request.options;
  std::vector<std::string> refused = request.refused;
  Candidates candidates;
  const std::string fp16 = "cast(fp16)";
  if (kMayGrow * steps.largest_gradient > kLargestFloat16 && may_run({.label = fp16, .what = fp16}, options, refused)) {
    refused.push_back(fp16);
    candidates.notes.push_back(fp16 + " is left out, of plans too: fp16 ends at " + format_text("%g", kLargestFloat16) +
                               ", and the largest gradient, " + format_text("%.3g", steps.largest_gradient) +
                               ", may grow by " + format_text("%g", kMayGrow) + " in steps to come");
  }
  const CandidateRequest fitting{request.tensors, options, request.topology, request.cluster, refused};
  const std::vector<AutoSetting> settings = allowed_settings(options, refused);
  candidates.list = {{.label = "dense", .what = "none"}};
  for (const AutoSetting& setting : settings) candidates.list.push_back({.label = setting.spec, .what = setting.spec});
  std::optional<Cluster> cluster = request.cluster;
  if (cluster.has_value()) {  // a file may spell codecs its own way
    for (CodecTimes& times : cluster->codecs) times.codec = canonical_codec(times.codec);
  }
  if (!cluster.has_value() && options.measure_s > 0) {
    CORTADO_ASSIGN_OR_RETURN(cluster, measure_cluster(options, request.topology, communicator, clock));
  }
  if (cluster.has_value() && communicator->rank() == 0) {
    // All is predicted at the pace of the dense steps, as it is compared with these. What was measured just now was
    // beside the steps in which nothing travels.
    const Job job = at_pace(job_of_steps(request.tensors, steps), steps.dense_pace());
    if (!request.cluster.has_value()) cluster = at_pace(*std::move(cluster), steps.dense_pace());
    Status predicted = job.check();
    if (predicted.ok()) predicted = add_predictions(fitting, job, steps, *cluster, &candidates);
    if (predicted.ok()) {
      keep_promising(!request.cluster.has_value() ? steps.dense_ns : candidates.list[0].predicted_ns, &candidates);
    } else {
      candidates.notes.push_back("auto tries without predictions: " + predicted.message());
    }
  }
  CORTADO_ASSIGN_OR_RETURN(const std::string text,
                           text_of_rank_0(communicator, candidates_to_json(candidates), timeout_of(options)));
  CORTADO_ASSIGN_OR_RETURN(Candidates found, candidates_from_json(text));
  found.predict = std::move(candidates.predict);
  return found;
}

}  // namespace cortado
