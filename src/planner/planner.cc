// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// make_plan(): problem, search, and what was found as a plan.
#include "cortado/planner.h"

#include <algorithm>

#include "core/check.h"
#include "core/format.h"
#include "planner/search/search.h"
#include "planner/search/strategies.h"

namespace cortado {

namespace {

// A gap above this is explained.
constexpr double kGapToExplain = 0.03;

double in_ms(std::int64_t ns) { return static_cast<double>(ns) * 1e-6; }

// "inter 83 %, gpu codec 12 %": how busy what is used is.
std::string utilisation(const Problem& problem, const Cluster& cluster, const SearchResult& found) {
  Loads loads = {};
  for (const Placed& placed : found.plan) {
    for (int r = 0; r < kMaxResources; ++r) loads[r] += placed.way->chain.loads[r];
  }
  const char* names[] = {"gpu codec", "cpu codec", "device to host", "host to device"};
  std::string result;
  for (int r = 0; r < kLink + problem.levels(); ++r) {
    if (loads[r] == 0) continue;
    const int servers = r == kCpuCodec ? problem.simulated().cpu_workers : 1;
    const double share = static_cast<double>(loads[r]) / static_cast<double>(found.score.step_ns * servers);
    result += (result.empty() ? "" : ", ") + (r < kLink ? std::string(names[r]) : cluster.levels[r - kLink].name) +
              format_text(" %.0f %%", share * 100);
  }
  return result.empty() ? "nothing" : result;
}

bool has_limits(const PlannerConstraints& constraints) {
  return constraints.max_lossy_passes.has_value() || constraints.max_memory_bytes.has_value() ||
         constraints.max_tensor_error.has_value() || constraints.max_total_error.has_value();
}

// Of a search that has chosen so.
std::string why_nothing_is_encoded(const Problem& problem) {
  if (problem.codecs().empty()) return "nothing is encoded: the cluster file has no times of an allowed codec";
  return std::string("nothing is encoded: no allowed codec makes the step shorter") +
         (has_limits(problem.constraints()) ? " within the limits" : "");
}

// `searches`: it is not the plan of a comparator, whose gap is its own.
void add_notes(const Problem& problem, const Cluster& cluster, const SearchResult& found, bool searches, Plan* plan) {
  const bool encodes = std::any_of(found.plan.begin(), found.plan.end(), [&](const Placed& placed) {
    return problem.candidates()[placed.way->candidate].codec >= 0;
  });
  if (!encodes && searches) plan->notes.push_back(why_nothing_is_encoded(problem));
  const double gap = static_cast<double>(found.score.step_ns - found.bound.step_ns) /
                     static_cast<double>(std::max<std::int64_t>(found.bound.step_ns, 1));
  const bool limits = has_limits(problem.constraints());
  std::string bound = format_text("lower bound %.3f ms from %s%s; gap %.2f %%", in_ms(found.bound.step_ns),
                                  found.bound.reason, limits ? ", without the limits" : "", gap * 100);
  if (found.is_exact) {
    bound += std::string(", but every plan of the candidates was tried: none") + (limits ? " within the limits" : "") +
             " is faster";
  }
  if (gap > kGapToExplain && searches) {
    if (found.is_cut_short.has_value() && !found.is_exact) {
      bound += *found.is_cut_short
                   ? format_text(
                         "; the search has spent the %lld steps it may, with more search_steps it may find "
                         "a faster plan",
                         static_cast<long long>(search_steps(problem)))
                   : "; the search ended where none of the changes it tries helps";
    }
    bound +=
        "; the bound lets loads of different resources overlap freely, while a tensor's steps follow each other. "
        "Busy: " +
        utilisation(problem, cluster, found);
  }
  plan->notes.push_back(std::move(bound));
}

Plan plan_of(Problem& problem, const Job& job, const Cluster& cluster, const SearchResult& found) {
  Plan plan;
  plan.job = job.name;
  plan.cluster = cluster.name;
  plan.topology = cluster.topology();
  for (const Placed& placed : found.plan) {
    const Candidate& candidate = problem.candidates()[placed.way->candidate];
    PlanBucket bucket;
    for (int t = placed.first; t <= placed.last; ++t) {
      bucket.tensors.push_back(job.tensors[t].name);
      bucket.elems.push_back(job.tensors[t].elems());
    }
    bucket.option = candidate.option;
    if (candidate.codec >= 0) {
      const CodecCost& codec = problem.codecs()[candidate.codec];
      bucket.codec = codec.spec;
      // A residual is as large as the gradient, and read and written in every step.
      bucket.error_feedback = codec.traits.needs_residual;
    }
    plan.buckets.push_back(std::move(bucket));
  }
  plan.predicted_step_ns = found.score.step_ns;
  plan.dense_step_ns = found.dense_ns;
  plan.lower_bound_ns = found.bound.step_ns;
  plan.options_considered = problem.options_considered();
  plan.notes = problem.notes();
  return plan;
}

}  // namespace

Result<Plan> make_plan(const Job& job, const Cluster& cluster, const PlannerConstraints& given,
                       std::string_view strategy) {
  PlannerConstraints constraints = given;
  if (strategy == "bf16") constraints.allowed_codecs = {cast_of_bf16(cluster)};
  CORTADO_ASSIGN_OR_RETURN(const std::unique_ptr<Problem> problem, Problem::make(job, cluster, constraints));
  SearchResult found;
  if (strategy == "cortado") {
    found = search(*problem);
  } else {
    CORTADO_ASSIGN_OR_RETURN(found, run_strategy(*problem, strategy));
  }
  if (strategy == "bf16") {  // no plan of the cast and of what is allowed is faster
    PlannerConstraints with_cast = given;
    if (!given.allowed_codecs.empty()) with_cast.allowed_codecs.push_back(cast_of_bf16(cluster));
    CORTADO_ASSIGN_OR_RETURN(const std::unique_ptr<Problem> allowed, Problem::make(job, cluster, with_cast));
    Problem& of_bounds = allowed->for_bounds();
    found.bound = lower_bound(of_bounds, quick_bound(of_bounds), found.score.step_ns);
  }
  Plan plan = plan_of(*problem, job, cluster, found);
  if (strategy.ends_with("_like")) {
    plan.notes.push_back("this is how this project reads what that system does; its own planner may do better");
  }
  if (strategy == "bf16" && cast_of_bf16(cluster) != "cast(bf16)") {
    plan.notes.push_back("the cluster file has no times of cast(bf16): " + cast_of_bf16(cluster) + " stands for it");
  }
  add_notes(*problem, cluster, found, strategy == "cortado", &plan);
  plan.notes.push_back(format_text("%lld options of the tree, %zu candidates, %lld operations simulated",
                                   static_cast<long long>(problem->options_considered()), problem->candidates().size(),
                                   static_cast<long long>(found.steps_done)));
  return plan;
}

std::vector<std::string> planner_strategies() {
  std::vector<std::string> names = {"cortado"};
  for (const char* strategy : strategy_names()) names.push_back(strategy);
  return names;
}

}  // namespace cortado
