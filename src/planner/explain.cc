// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <span>

#include "core/check.h"
#include "core/format.h"
#include "cortado/codec.h"
#include "cortado/planner.h"
#include "planner/free_compression.h"
#include "planner/search/local_search.h"
#include "planner/search/search.h"
#include "planner/search/strategies.h"

namespace cortado {

namespace {

std::string milliseconds(std::int64_t ns) { return format_text("%.3f", static_cast<double>(ns) * 1e-6); }

// The plan in the problem's terms.
Result<std::vector<Placed>> place(Problem& problem, const Plan& plan, const Job& job) {
  std::vector<Placed> placed;
  int next = 0;
  for (std::size_t b = 0; b < plan.buckets.size(); ++b) {
    const PlanBucket& bucket = plan.buckets[b];
    const auto count = static_cast<int>(bucket.tensors.size());
    for (int i = 0; i < count; ++i) {
      if (job.tensors[next + i].name == bucket.tensors[i]) continue;
      return make_error(StatusCode::kUnsupported,
                        "plan: $.buckets[%zu]: only buckets of neighbours in order of readiness are explained", b);
    }
    const CodecCost* const cost = find_codec_cost(problem.codecs(), bucket.codec);
    const int codec = bucket.option.encodes() > 0 && cost != nullptr ? cost->number : -1;
    const Way* way = problem.way_of(next, next + count - 1, problem.add_candidate({codec, bucket.option}));
    if (way == nullptr) {
      return make_error(StatusCode::kMismatch, "plan: $.buckets[%zu]: \"%s\" is not allowed, or has no times", b,
                        bucket.codec.c_str());
    }
    placed.push_back({next, next + count - 1, way});
    next += count;
  }
  return placed;
}

class Explainer {
 public:
  Explainer(Problem& problem, const Cluster& cluster, std::vector<Placed> placed)
      : problem_(problem), cluster_(cluster), placed_(std::move(placed)), local_(&problem) {
    step_ns_ = local_.step_ns(placed_, &is_allowed_);
  }

  bool is_allowed() const { return is_allowed_; }  // the plan, by the limits of a whole one

  ExplainedBucket explain(std::size_t bucket) {
    const Placed chosen = placed_[bucket];
    ExplainedBucket explained;
    explained.own_ns = chosen.way->chain.own_ns;
    std::map<int, Other> best;  // by codec
    std::int64_t dense_ns = Simulator::kNever;
    for (const Way* way : problem_.ways(chosen.first, chosen.last)) {
      if (way->candidate == chosen.way->candidate) continue;
      placed_[bucket].way = way;
      Other other = {.way = way};
      other.step_ns = local_.step_ns(placed_, &other.is_allowed);
      const int codec = problem_.candidates()[way->candidate].codec;
      if (codec < 0) dense_ns = std::min(dense_ns, other.step_ns);
      const auto [entry, is_new] = best.try_emplace(codec, other);
      if (!is_new && other.is_before(entry->second)) entry->second = other;
    }
    placed_[bucket] = chosen;
    const bool is_dense = problem_.candidates()[chosen.way->candidate].codec < 0;
    explained.gain_ns = is_dense || dense_ns == Simulator::kNever ? 0 : dense_ns - step_ns_;
    for (const auto& [codec, found] : best) {
      const Candidate& candidate = problem_.candidates()[found.way->candidate];
      explained.others.push_back({codec < 0 ? "none" : problem_.codecs()[codec].spec, candidate.option, found.step_ns,
                                  found.is_allowed, why(*chosen.way, found)});
    }
    std::stable_sort(explained.others.begin(), explained.others.end(), [](const auto& a, const auto& b) {
      return std::pair(!a.is_allowed, a.step_ns) < std::pair(!b.is_allowed, b.step_ns);
    });
    for (std::size_t c = 0; c < problem_.codecs().size(); ++c) {
      if (best.count(static_cast<int>(c)) > 0 ||
          static_cast<int>(c) == problem_.candidates()[chosen.way->candidate].codec)
        continue;
      explained.others.push_back({problem_.codecs()[c].spec,
                                  {},
                                  -1,
                                  false,
                                  "each of its options takes no less of anything than another one, is a tenth dearer "
                                  "at every mixture of prices that was tried, or breaks a limit"});
    }
    return explained;
  }

 private:
  struct Other {
    const Way* way = nullptr;
    std::int64_t step_ns = 0;
    bool is_allowed = false;  // by the limits of a whole plan

    bool is_before(const Other& other) const {
      return std::pair(!is_allowed, step_ns) < std::pair(!other.is_allowed, other.step_ns);
    }
  };

  // What the other way takes more of.
  std::string why(const Way& chosen, const Other& found) const {
    const Way& other = *found.way;
    const std::int64_t step_ns = found.step_ns;
    const char* names[] = {"GPU codec", "CPU codec", "device to host", "host to device"};
    int worst = -1;
    std::int64_t more_ns = 0;
    for (int r = 0; r < kLink + problem_.levels(); ++r) {
      const std::int64_t more = other.chain.loads[r] - chosen.chain.loads[r];
      if (more > more_ns) more_ns = more, worst = r;
    }
    std::string reason = "step as long";
    if (step_ns > step_ns_) reason = "step " + milliseconds(step_ns - step_ns_) + " ms longer";
    if (step_ns < step_ns_) reason = "step " + milliseconds(step_ns_ - step_ns) + " ms shorter";
    if (!found.is_allowed) {
      reason += ", over a limit";
    } else if (step_ns < step_ns_) {
      reason += ", which this plan does not take";
    }
    if (worst >= 0) {
      reason += ", " + milliseconds(more_ns) + " ms more of " +
                (worst < kLink ? std::string(names[worst]) : "link " + cluster_.levels[worst - kLink].name);
    }
    if (other.lossy_elems > chosen.lossy_elems) reason += ", loses more";
    return reason;
  }

  Problem& problem_;
  const Cluster& cluster_;
  std::vector<Placed> placed_;
  LocalSearch local_;
  std::int64_t step_ns_;
  bool is_allowed_ = false;
};

}  // namespace

Result<Explanation> explain_plan(const Plan& plan, const Job& job, const Cluster& cluster,
                                 const PlannerConstraints& constraints) {
  CORTADO_ASSIGN_OR_RETURN(const Timeline timeline, simulate_plan(plan, job, cluster));
  // What the plan uses stays, though another codec may never be slower. The comparator bf16 uses its cast, whether it
  // is allowed or not.
  std::vector<std::string> used;
  for (const PlanBucket& bucket : plan.buckets) {
    if (bucket.option.encodes() > 0) used.push_back(bucket.codec);
  }
  PlannerConstraints with_cast = constraints;
  const std::string cast = cast_of_bf16(cluster);
  const bool has_cast =
      std::any_of(used.begin(), used.end(), [&](const std::string& codec) { return canonical_codec(codec) == cast; });
  if (has_cast && !constraints.allowed_codecs.empty()) with_cast.allowed_codecs.push_back(cast);
  CORTADO_ASSIGN_OR_RETURN(const std::unique_ptr<Problem> problem, Problem::make(job, cluster, with_cast, used));
  CORTADO_ASSIGN_OR_RETURN(std::vector<Placed> placed, place(*problem, plan, job));
  Explainer explainer(*problem, cluster, std::move(placed));
  if (!explainer.is_allowed()) {
    return make_error(StatusCode::kMismatch, "plan: it breaks a limit of memory or error that is asked for here");
  }
  Explanation explanation;
  explanation.step_ns = timeline.step_ns;
  for (const std::string& strategy : planner_strategies()) {
    const Result<Plan> other = make_plan(job, cluster, constraints, strategy);
    std::int64_t step_ns = other.ok() ? other.value().predicted_step_ns : -1;
    if (strategy == "dense" && used.empty()) step_ns = std::min(step_ns, explanation.step_ns);  // the plan is one
    if (strategy == "cortado" && step_ns == explanation.step_ns) continue;  // this is that plan, or as good
    const bool is_fp16 = strategy == "bf16" && step_ns >= 0 && cast_of_bf16(cluster) != "cast(bf16)";
    explanation.totals.push_back({is_fp16 ? "bf16 (as " + cast_of_bf16(cluster) + ")" : strategy, step_ns});
    if (step_ns < 0) continue;
    const auto encodes = [](const PlanBucket& bucket) { return bucket.option.encodes() > 0; };
    const bool compresses = std::any_of(other.value().buckets.begin(), other.value().buckets.end(), encodes);
    std::optional<std::pair<std::string, std::int64_t>>& best = explanation.best_that_compresses;
    if (compresses && (!best.has_value() || step_ns < best->second)) best = explanation.totals.back();
  }
  CORTADO_ASSIGN_OR_RETURN(const std::int64_t free_ns, free_compression_ns(plan, job, cluster, with_cast));
  explanation.totals.push_back({"free compression", free_ns});
  explanation.totals.push_back(
      {"lower bound",
       lower_bound(problem->for_bounds(), quick_bound(problem->for_bounds()), timeline.step_ns).step_ns});
  for (std::size_t b = 0; b < plan.buckets.size(); ++b) {
    explanation.buckets.push_back(explainer.explain(b));
    explanation.buckets.back().error = expected_error(plan, job, static_cast<int>(b));
  }
  return explanation;
}

std::string explanation_to_text(const Explanation& explanation, const Plan& plan) {
  std::string result = format_text("step %s ms", milliseconds(explanation.step_ns).c_str());
  result += "; against it:\n";
  for (const auto& [name, step_ns] : explanation.totals) {
    result += step_ns < 0 ? format_text("  %-22s not possible here\n", name.c_str())
                          : format_text("  %-22s %12s ms  %6.3fx\n", name.c_str(), milliseconds(step_ns).c_str(),
                                        static_cast<double>(step_ns) /
                                            static_cast<double>(std::max<std::int64_t>(explanation.step_ns, 1)));
  }
  if (const auto& best = explanation.best_that_compresses; best.has_value()) {
    result += format_text(
        "%.3fx as fast as the best of them that compresses, %s\n",
        static_cast<double>(best->second) / static_cast<double>(std::max<std::int64_t>(explanation.step_ns, 1)),
        best->first.c_str());
  }
  for (const std::string& note : plan.notes) result += "note: " + printable(note) + "\n";
  for (std::size_t b = 0; b < plan.buckets.size(); ++b) {
    const PlanBucket& bucket = plan.buckets[b];
    const ExplainedBucket& explained = explanation.buckets[b];
    result += format_text("\nbucket %zu, %zu tensors, alone %s ms", b, bucket.tensors.size(),
                          milliseconds(explained.own_ns).c_str());
    if (explained.gain_ns != 0)
      result += format_text(", %s ms gained over dense", milliseconds(explained.gain_ns).c_str());
    if (bucket.option.encodes() > 0) {
      result += explained.error.has_value() ? format_text(", relative error %.3g", *explained.error)
                                            : ", relative error not measured";
    }
    result +=
        ": " +
        printable((bucket.option.encodes() > 0 ? bucket.codec + " " : "") + bucket.option.to_string(plan.topology)) +
        "\n";
    for (const std::string& tensor : bucket.tensors) result += "  " + printable(tensor) + "\n";
    bool is_first = true;
    for (const ExplainedWay& other : explained.others) {
      result += is_first && other.is_allowed ? "  runner-up " : "  rejected  ";
      result += printable(other.codec + (other.step_ns >= 0 ? " " + other.option.to_string(plan.topology) : "") + ": " +
                          other.reason) +
                "\n";
      is_first = false;
    }
  }
  return result;
}

}  // namespace cortado
