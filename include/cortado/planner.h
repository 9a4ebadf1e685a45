// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The planner: options, and what it makes of them. Pure: no clock, no files, no device; any thread may call it.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cortado/cluster.h"
#include "cortado/job.h"
#include "cortado/option.h"
#include "cortado/plan.h"
#include "cortado/status.h"
#include "cortado/trace.h"

namespace cortado {

// ---- options: the decision tree of Espresso (EuroSys 2023, section 4.2) for several levels ------------------------

struct OptionSpace {
  int levels = 2;
  std::vector<OpDevice> devices = {OpDevice::kCpu, OpDevice::kGpu};  // where encode and decode may run
  bool rooted = true;                                                // reduce, gather and broadcast too
  bool sum_payloads = false;  // beyond the tree: all_reduce, reduce_scatter and reduce of payloads (linear codecs)
};

// Of an option space, and of the clusters that are planned for.
constexpr int kMaxLevels = 4;

// Distinct, each one passes Option::check(), the plain ones first. With two levels, both devices and rooted
// collectives 4341; with one device 174, and 54 without rooted ones. Three levels have 294,993, four levels millions:
// visit_options() keeps none of them, count_options() walks none. All three refuse less than one level and more than
// kMaxLevels with kInvalidArgument.
Result<std::vector<Option>> generate_options(const OptionSpace& space);
Status visit_options(const OptionSpace& space, const std::function<void(const Option& option)>& visit);
Result<std::int64_t> count_options(const OptionSpace& space);

// ---- plans ---------------------------------------------------------------------------------------------------------

inline constexpr std::int64_t kMaxSearchSteps = 1'000'000'000'000;

// What a plan must keep to. Errors are relative L2 errors as the job file has them measured; an option that encodes a
// tensor several times counts as many times the codec's error. A codec without a measured error of a tensor is no
// candidate for it where a limit of errors is set.
struct PlannerConstraints {
  std::vector<std::string> allowed_codecs = {};       // specifications; empty: all codecs of the cluster file
  std::optional<int> max_lossy_passes = {};           // encodes of a tensor that lose something
  std::optional<std::int64_t> max_memory_bytes = {};  // on a rank, of all buckets: residuals and payloads
  std::optional<double> max_tensor_error = {};        // of each tensor
  // Of the whole gradient, by the rms of its tensors; without any of them all count as equal, with some it is an error.
  std::optional<double> max_total_error = {};
  // What the local search of the strategy "cortado" may spend, in simulated operations, at most kMaxSearchSteps; 0: by
  // the size of the job. Espresso's algorithms, tidying up and, on small jobs, trying everything come on top.
  std::int64_t search_steps = 0;
};

// The fastest plan that was found. Deterministic; `planner_ns` is left to the caller. Errors name what is wrong in job,
// cluster or constraints.
//
// `strategy`: "cortado", or one of the comparators, each with the best of the fusions up to a size, from all in one
// message to each tensor by itself:
//   dense                  nothing is encoded; this one is improved by local search, too
//   bf16                   every tensor cast to 16 bits (cast(fp16) where the cluster file has no times of cast(bf16))
//   compress_all           every tensor encoded, each by the option that takes least time by itself
//   myopic                 each tensor by the option that takes least time by itself
//   gpu_only, cpu_only     Espresso's Algorithm 1 with options of one device
//   espresso               Espresso's Algorithms 1 and 2, with the best of the allowed codecs; where Algorithm 2 has
//                          over 4096 combinations to try, it goes one group of tensors after the other
//   one fixed option, as this project reads those systems:
//   hitopk_like            reduce_scatter@intra encode@gpu all_gather@inter decode@gpu all_gather@intra
//   byteps_compress_like   reduce_scatter@intra encode@cpu all_to_all@inter decode@cpu encode@cpu all_gather@inter
//                          decode@cpu all_gather@intra
//   hipress_like           the latter on the GPU, for tensors whose own time falls
Result<Plan> make_plan(const Job& job, const Cluster& cluster, const PlannerConstraints& constraints,
                       std::string_view strategy = "cortado");

std::vector<std::string> planner_strategies();

// ---- what a plan would do ------------------------------------------------------------------------------------------

// One thing that something is busy with.
struct TimelineEvent {
  std::int64_t start_ns = 0, end_ns = 0;
  int row = 0;
  int bucket = -1;     // of the plan; -1: the compute stream
  int operation = -1;  // of the bucket's option; copies have that of the operation they are for; -1: compute stream
  std::string name;    // "encode", "copy", "all_gather"; "backward", "optimizer", "forward"
};

struct Timeline {
  std::int64_t step_ns = 0;           // from the start of a backward pass to the start of the next one
  std::vector<std::string> rows;      // "compute", "gpu codec", "cpu codec", "device to host", "host to device", levels
  std::vector<TimelineEvent> events;  // by row and time
};

// Simulates one step. Refuses plans that are not of this job (tensors missing, unknown, twice or of another size) or
// cluster (levels), or that need times the cluster file does not have.
Result<Timeline> simulate_plan(const Plan& plan, const Job& job, const Cluster& cluster);

// The relative L2 error of the gradient, or of the tensors of one bucket, that the plan's codecs had where the job was
// measured, each lossy pass counted, without error feedback; tensors weigh as for max_total_error. Empty where the job
// has none of some tensor, or the rms of some tensors only.
std::optional<double> expected_error(const Plan& plan, const Job& job, int bucket = -1);

// One line a row, `width` characters for the step; buckets by letter, with what they are below.
std::string timeline_to_text(const Timeline& timeline, const Plan& plan, int width = 100);

// For chrome://tracing and Perfetto.
std::string timeline_to_trace(const Timeline& timeline, const Plan& plan);

// ---- why -----------------------------------------------------------------------------------------------------------

// How else a bucket could go, all others as they are.
struct ExplainedWay {
  std::string codec;          // "none": without encoding
  Option option;              // the best one with that codec, of those that keep to the limits if some do
  std::int64_t step_ns = -1;  // -1: the codec has no candidate for the bucket
  bool is_allowed = false;    // false: there is none, or with it the plan would be over a limit
  std::string reason;         // why it was not chosen
};

struct ExplainedBucket {
  std::int64_t own_ns = 0;           // what the bucket takes by itself
  std::optional<double> error;       // expected_error()
  std::int64_t gain_ns = 0;          // by how much the step would be longer, went this bucket without encoding
  std::vector<ExplainedWay> others;  // best first, those that are allowed before the others: the runner-up
};

struct Explanation {
  std::int64_t step_ns = 0;
  std::vector<std::pair<std::string, std::int64_t>> totals;  // step times of comparators and bounds; -1: not possible
  std::optional<std::pair<std::string, std::int64_t>> best_that_compresses;  // of the comparators, where one does
  std::vector<ExplainedBucket> buckets;                                      // as those of the plan
};

// Takes longer than planning: every comparator runs. For plans whose buckets are neighbours, as make_plan()'s are.
Result<Explanation> explain_plan(const Plan& plan, const Job& job, const Cluster& cluster,
                                 const PlannerConstraints& constraints);
std::string explanation_to_text(const Explanation& explanation, const Plan& plan);

// A time within a step: as simulated, and as a trace has it, the median over its steps.
struct PredictedTime {
  std::string what;
  std::int64_t predicted_ns = 0, measured_ns = 0;

  bool operator==(const PredictedTime&) const = default;
};

// What both have, which leaves computation out: "exchange", from the first encode or transfer of a step to the end of
// the last one; "encode" and "decode", what all of them take together. Empty if the trace is.
std::vector<PredictedTime> compare_with_trace(const Timeline& timeline, const Trace& trace);

// One self-contained page: the timelines of the best dense plan and of this one, over the same span, and of a measured
// trace if there is one, with what was predicted; totals; every tensor. `explanation` is of this plan; `search_steps`
// are those it was made with.
Result<std::string> report_to_html(const Plan& plan, const Job& job, const Cluster& cluster,
                                   const Explanation& explanation, const Trace* measured = nullptr,
                                   std::int64_t search_steps = 0);

}  // namespace cortado
