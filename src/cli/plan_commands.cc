// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cli/plan_commands.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <set>
#include <string_view>

#include "cli/codec_commands.h"
#include "cli/input.h"
#include "cli/output_paths.h"
#include "cortado/auto.h"
#include "cortado/files.h"
#include "cortado/printable.h"
#include "cortado/trace.h"

namespace cortado::cli {

namespace {

int write(const std::string& path, std::string_view text) {
  const Status status = write_file(path, text);
  return status.ok() ? kDone : report_error(path, status);
}

double milliseconds(std::int64_t ns) { return static_cast<double>(ns) * 1e-6; }

// Those of the cluster file that auto may use in plans at this quality.
Status allow_quality(const std::string& name, const Cluster& cluster, PlannerConstraints* constraints) {
  const Result<AutoOptions> options = AutoOptions::parse("auto(quality=" + name + ")");
  if (!options.ok()) return options.status();
  for (const std::string& codec : auto_plan_codecs(options.value().quality)) {
    const bool is_measured = std::any_of(cluster.codecs.begin(), cluster.codecs.end(),
                                         [&](const auto& times) { return canonical_codec(times.codec) == codec; });
    if (is_measured) constraints->allowed_codecs.push_back(codec);
  }
  if (!constraints->allowed_codecs.empty()) return {};
  return Status(StatusCode::kInvalidArgument,
                "the cluster file has no times of a codec that auto may use in plans at it");
}

void print_summary(std::FILE* out, const Plan& plan, const Job& job, bool has_notes) {
  int encoded = 0;
  std::size_t tensors = 0;
  for (const PlanBucket& bucket : plan.buckets) {
    encoded += bucket.option.encodes() > 0;
    tensors += bucket.tensors.size();
  }
  std::fprintf(out, "%s on %s: step %.3f ms, dense %.3f ms, lower bound %.3f ms\n", printable(plan.job).c_str(),
               printable(plan.cluster).c_str(), milliseconds(plan.predicted_step_ns), milliseconds(plan.dense_step_ns),
               milliseconds(plan.lower_bound_ns));
  std::fprintf(out, "%zu tensors in %zu buckets, %d of them encoded; planned in %.2f ms\n", tensors,
               plan.buckets.size(), encoded, milliseconds(plan.planner_ns));
  if (const std::optional<double> error = expected_error(plan, job); encoded > 0 && error.has_value()) {
    std::fprintf(
        out, "relative error of the gradient, as the job has it measured: %.3g (--quality, --max-total-error: less)\n",
        *error);
  } else if (encoded > 0) {
    std::fprintf(
        out, "relative error of the gradient: the job has not all that are needed (cortado.profile measures them)\n");
  }
  for (std::size_t i = 0; has_notes && i < plan.notes.size(); ++i)
    std::fprintf(out, "%s\n", printable(plan.notes[i]).c_str());
}

// A trace of another model than the job's has other tensors.
void note_unknown_tensors(const Trace& measured, const Job& job) {
  std::set<std::string_view> known;
  for (const JobTensor& tensor : job.tensors) known.insert(tensor.name);
  std::vector<std::string_view> unknown;
  for (const std::string& name : measured.tensors) {
    if (known.count(name) == 0) unknown.push_back(name);
  }
  if (unknown.empty()) return;
  std::fprintf(stderr, "note: job \"%s\" lacks %zu of the %zu tensors of the trace, such as \"%s\"\n",
               printable(job.name).c_str(), unknown.size(), measured.tensors.size(), printable(unknown[0]).c_str());
}

int print_comparison(std::FILE* out, const Plan& plan, const Job& job, const Cluster& cluster, const Trace& measured) {
  const Result<Timeline> timeline = simulate_plan(plan, job, cluster);
  if (!timeline.ok()) return report_error("", timeline.status());
  for (const PredictedTime& time : compare_with_trace(timeline.value(), measured)) {
    const double error =
        milliseconds(time.predicted_ns) / milliseconds(std::max<std::int64_t>(time.measured_ns, 1)) - 1;
    std::fprintf(out, "%s: predicted %.3f ms, measured %.3f ms", time.what.c_str(), milliseconds(time.predicted_ns),
                 milliseconds(time.measured_ns));
    if (time.measured_ns > 0) std::fprintf(out, " (%+.0f %%)", 100 * error);
    std::fprintf(out, "\n");
  }
  return kDone;
}

}  // namespace

int make_plan_file(const PlanOptions& options) {
  if (options.constraints.search_steps > 0 && options.strategy != "cortado") {
    return report_error("--search-steps", Status(StatusCode::kInvalidArgument,
                                                 "only the strategy cortado searches, not " + options.strategy));
  }
  int code =
      check_outputs({{"JOB", options.job_path}, {"CLUSTER", options.cluster_path}, {"--measured", options.trace_path}},
                    {{"-o", options.plan_path}, {"--html", options.html_path}});
  if (code != kDone) return code;
  const auto job = read_input<Job>(options.job_path, job_from_json, &code);
  const auto cluster = job != nullptr ? read_input<Cluster>(options.cluster_path, cluster_from_json, &code) : nullptr;
  if (cluster == nullptr) return code;
  std::unique_ptr<Trace> measured;
  if (!options.trace_path.empty() && (measured = read_input<Trace>(options.trace_path, parse_trace, &code)) == nullptr)
    return code;
  if (measured != nullptr && measured->events.empty()) {
    return report_error(options.trace_path,
                        Status(StatusCode::kCorruptData, "the trace has no events to compare with"));
  }
  if (measured != nullptr) note_unknown_tensors(*measured, *job);
  std::FILE* const out = text_stream({options.plan_path, options.html_path});
  PlannerConstraints constraints = options.constraints;
  if (!options.quality.empty()) {
    const Status status = allow_quality(options.quality, *cluster, &constraints);
    if (!status.ok()) return report_error("--quality " + options.quality, status);
  }
  const std::int64_t start_ns = steady_clock()->now_ns();
  Result<Plan> made = make_plan(*job, *cluster, constraints, options.strategy);
  if (!made.ok()) return report_error("", made.status());
  Plan& plan = made.value();
  plan.planner_ns = steady_clock()->now_ns() - start_ns;
  if (!options.plan_path.empty()) code = write(options.plan_path, plan_to_json(plan));
  if (code != kDone) return code;
  print_summary(out, plan, *job, /*has_notes=*/!options.explain);  // which has them, too
  if (measured != nullptr) code = print_comparison(out, plan, *job, *cluster, *measured);
  if (code != kDone) return code;
  if (!options.explain && options.html_path.empty()) return kDone;
  const Result<Explanation> explanation = explain_plan(plan, *job, *cluster, constraints);
  if (!explanation.ok()) return report_error("", explanation.status());
  if (options.explain) std::fprintf(out, "\n%s", explanation_to_text(explanation.value(), plan).c_str());
  if (options.html_path.empty()) return kDone;
  const Result<std::string> page =
      report_to_html(plan, *job, *cluster, explanation.value(), measured.get(), constraints.search_steps);
  return page.ok() ? write(options.html_path, page.value()) : report_error("", page.status());
}

int simulate_plan_file(const SimulateOptions& options) {
  int code = check_outputs({{"PLAN", options.plan_path}, {"JOB", options.job_path}, {"CLUSTER", options.cluster_path}},
                           {{"--trace", options.trace_path}});
  if (code != kDone) return code;
  const auto plan = read_input<Plan>(options.plan_path, plan_from_json, &code);
  const auto job = plan != nullptr ? read_input<Job>(options.job_path, job_from_json, &code) : nullptr;
  const auto cluster = job != nullptr ? read_input<Cluster>(options.cluster_path, cluster_from_json, &code) : nullptr;
  if (cluster == nullptr) return code;
  const Result<Timeline> timeline = simulate_plan(*plan, *job, *cluster);
  if (!timeline.ok()) return report_error(options.plan_path, timeline.status());
  if (!plan->cluster.empty() && plan->cluster != cluster->name) {
    std::fprintf(stderr, "note: the plan was made for cluster \"%s\", this is \"%s\"\n",
                 printable(plan->cluster).c_str(), printable(cluster->name).c_str());
  }
  if (!options.trace_path.empty()) code = write(options.trace_path, timeline_to_trace(timeline.value(), *plan));
  if (code == kDone)
    std::fprintf(text_stream({options.trace_path}), "%s",
                 timeline_to_text(timeline.value(), *plan, options.width).c_str());
  return code;
}

}  // namespace cortado::cli
