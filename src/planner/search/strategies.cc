// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "planner/search/strategies.h"

#include <algorithm>
#include <functional>

#include "core/check.h"
#include "planner/search/espresso.h"
#include "planner/search/local_search.h"

namespace cortado {

namespace {

constexpr std::int64_t kMaxCombinations = 4096;  // of Algorithm 2, before it goes group by group

// Of what a search may spend, what goes into the plan that does not encode: one part in so many.
constexpr std::int64_t kShareOfDense = 26;

using Choose = std::function<const Way*(int first, int last)>;

const Way* faster(const Way* a, const Way* b) {
  if (a == nullptr || b == nullptr) return a == nullptr ? b : a;
  return b->chain.own_ns < a->chain.own_ns ? b : a;
}

// The way without encodes that takes least time by itself.
const Way* fastest_dense_way(Problem& problem, int first, int last) {
  const Way* fastest = nullptr;
  for (const Way* way : problem.plain_ways(first, last)) fastest = faster(fastest, way);
  return fastest;
}

// The least own time of all options that encode with `codec`, on any device.
const Way* fastest_encoding_way(Problem& problem, int codec, int first, int last) {
  PriceSets prices;
  for (Costs& costs : prices) costs.fill(1);
  Pricer& pricer = problem.pricer(codec);
  const Costs costs = pricer.solve(problem.shape(first, last), prices, problem.max_encodes(codec), 1);
  if (costs[0] >= Pricer::kNoOption) return nullptr;
  const Way* fastest = problem.way_of(first, last, problem.add_candidate({codec, pricer.option(0)}));
  if (fastest != nullptr || !problem.codecs()[codec].traits.low_rank) return fastest;
  for (Option& option : problem.sums_of_factors(codec)) {  // engines do not take that one
    fastest = faster(fastest, problem.way_of(first, last, problem.add_candidate({codec, std::move(option)})));
  }
  return fastest;
}

class Strategies {
 public:
  explicit Strategies(Problem& problem) : problem_(problem), local_(&problem) {}

  Result<SearchResult> run(std::string_view strategy) {
    DensePlans dense = find_dense_plans(problem_, &local_);
    result_.dense_ns = dense.fastest_score.step_ns;
    if (strategy == "dense") {
      result_.plan = std::move(dense.fastest);
      result_.score = dense.fastest_score;
      return finish();
    }
    if (strategy == "bf16") return bf16();
    if (strategy == "myopic" || strategy == "compress_all") return own_times(strategy == "compress_all");
    if (strategy == "espresso") return greedy({OpDevice::kGpu, OpDevice::kCpu}, true);
    if (strategy == "gpu_only") return greedy({OpDevice::kGpu}, false);
    if (strategy == "cpu_only") return greedy({OpDevice::kCpu}, false);
    const bool hitopk = strategy == "hitopk_like", byteps = strategy == "byteps_compress_like";
    if (hitopk || byteps || strategy == "hipress_like")
      return fixed_option(hitopk, byteps ? OpDevice::kCpu : OpDevice::kGpu, strategy == "hipress_like");
    std::string known;
    for (const char* name : strategy_names()) known += std::string(known.empty() ? "" : ", ") + name;
    return make_error(StatusCode::kNotFound, "no strategy \"%.*s\"; there are cortado, %s",
                      static_cast<int>(strategy.size()), strategy.data(), known.c_str());
  }

 private:
  Result<SearchResult> finish() {
    if (result_.plan.empty()) {
      return make_error(StatusCode::kUnsupported,
                        "the strategy has no plan here: no allowed codec has the times it needs, or what it makes of "
                        "them breaks a limit");
    }
    result_.bound = lower_bound(problem_.for_bounds(), quick_bound(problem_.for_bounds()), result_.score.step_ns);
    result_.steps_done = local_.steps_done();
    return result_;
  }

  void keep(std::vector<Placed> plan) {
    const Score score = local_.score(plan);
    if (score < result_.score) result_.score = score, result_.plan = std::move(plan);
  }

  // With every fusion; buckets that have no way break the strategy.
  void keep_best(const Choose& choose) {
    for (const std::int64_t cap : fusion_caps(problem_)) {
      bool can = true;
      std::vector<Placed> plan = fuse_up_to(problem_, cap, [&](int first, int last) {
        const Way* way = choose(first, last);
        can &= way != nullptr;
        return way;
      });
      if (can) keep(std::move(plan));
    }
  }

  // The one codec that make_plan() allows for it.
  Result<SearchResult> bf16() {
    if (problem_.codecs().empty()) return finish();
    keep_best([&](int first, int last) { return fastest_encoding_way(problem_, 0, first, last); });
    return finish();
  }

  Result<SearchResult> own_times(bool all) {
    keep_best([&](int first, int last) {
      const Way* best = all ? nullptr : fastest_dense_way(problem_, first, last);
      for (int codec = 0; codec < static_cast<int>(problem_.codecs().size()); ++codec) {
        best = faster(best, fastest_encoding_way(problem_, codec, first, last));
      }
      return best;
    });
    return finish();
  }

  // Algorithm 1 with the options of the first of `devices` that the codec runs on, and perhaps Algorithm 2.
  Result<SearchResult> greedy(const std::vector<OpDevice>& devices, bool offload) {
    for (int codec = 0; codec < static_cast<int>(problem_.codecs().size()); ++codec) {
      for (const OpDevice device : devices) {
        if (!problem_.codecs()[codec].runs_on(device)) continue;
        if (device == OpDevice::kGpu && problem_.model().home == OpDevice::kCpu) continue;
        const WaysOf ways_of = ways_of_options(problem_, options_on(problem_, codec, device));
        for (const std::int64_t cap : fusion_caps(problem_)) {
          std::vector<Placed> plan = dense_plan(problem_, cap);
          Simulator simulator(problem_.simulated(), problem_.levels());
          choose_greedily(problem_, ways_of, &simulator, Simulator::kNever, &plan);
          if (offload) offload_to_cpu(problem_, kMaxCombinations, &plan);
          keep(std::move(plan));
        }
        break;
      }
    }
    return finish();
  }

  Result<SearchResult> fixed_option(bool is_hitopk, OpDevice device, bool only_where_faster) {
    const int levels = problem_.levels();
    const LevelRange inner = {0, 0}, outer = {levels > 1 ? 1 : 0, levels - 1};
    const Operation encode = {.kind = OpKind::kEncode, .device = device},
                    decode = {.kind = OpKind::kDecode, .device = device};
    Option option;
    const auto travel = [&](OpKind kind, LevelRange range, bool encoded) {
      option.operations.push_back({.kind = kind, .levels = range, .encoded = encoded});
    };
    if (levels > 1) travel(OpKind::kReduceScatter, inner, false);
    option.operations.push_back(encode);
    if (!is_hitopk) {
      travel(OpKind::kAllToAll, outer, true);
      option.operations.push_back(decode);
      option.operations.push_back(encode);
    }
    travel(OpKind::kAllGather, outer, true);
    option.operations.push_back(decode);
    if (levels > 1) travel(OpKind::kAllGather, inner, false);
    for (int codec = 0; codec < static_cast<int>(problem_.codecs().size()); ++codec) {
      const int candidate = problem_.add_candidate({codec, option});
      keep_best([&](int first, int last) {
        const Way* way = problem_.way_of(first, last, candidate);
        return only_where_faster ? faster(fastest_dense_way(problem_, first, last), way) : way;
      });
    }
    return finish();
  }

  Problem& problem_;
  LocalSearch local_;
  SearchResult result_;
};

}  // namespace

std::vector<const char*> strategy_names() {
  return {"dense",    "bf16",        "compress_all",         "myopic",      "gpu_only", "cpu_only",
          "espresso", "hitopk_like", "byteps_compress_like", "hipress_like"};
}

Result<SearchResult> run_strategy(Problem& problem, std::string_view strategy) {
  return Strategies(problem).run(strategy);
}

std::string cast_of_bf16(const Cluster& cluster) {
  const auto is_bf16 = [](const CodecTimes& times) { return canonical_codec(times.codec) == "cast(bf16)"; };
  return std::any_of(cluster.codecs.begin(), cluster.codecs.end(), is_bf16) ? "cast(bf16)" : "cast(fp16)";
}

std::vector<std::int64_t> fusion_caps(const Problem& problem) {
  std::vector<std::int64_t> caps;
  constexpr std::int64_t kSmallest = std::int64_t{1} << 18;
  for (std::int64_t cap = problem.bytes(0, problem.tensors() - 1); cap > kSmallest; cap /= 2) caps.push_back(cap);
  caps.push_back(0);
  return caps;
}

DensePlans find_dense_plans(Problem& problem, LocalSearch* local) {
  DensePlans found;
  for (const std::int64_t cap : fusion_caps(problem)) {
    std::vector<Placed> plan = dense_plan(problem, cap);
    const Score score = local->score(plan, found.by_size_score);
    if (score < found.by_size_score) found.by_size_score = score, found.by_size = std::move(plan);
  }
  local->start(found.by_size);
  local->set_plain_only(true);
  local->improve(local->spent() + search_steps(problem) / kShareOfDense);
  local->set_plain_only(false);
  found.fastest = local->plan();
  found.fastest_score = local->best();
  return found;
}

std::vector<Placed> dense_plan(Problem& problem, std::int64_t cap_bytes) {
  return fuse_up_to(problem, cap_bytes, [&](int first, int last) { return fastest_dense_way(problem, first, last); });
}

}  // namespace cortado
