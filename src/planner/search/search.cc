// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "planner/search/search.h"

#include <algorithm>
#include <limits>

#include "planner/search/espresso.h"
#include "planner/search/exhaustive.h"
#include "planner/search/local_search.h"
#include "planner/search/strategies.h"

namespace cortado {

namespace {

// What a bucket takes of each resource, weighted: the different choices that starting plans make.
using Prices = std::array<double, kMaxResources>;

Prices prices_of(int scarce, int levels) {
  Prices prices;
  for (int r = 0; r < kMaxResources; ++r) prices[r] = (scarce & scarcity_of(r, levels)) != 0 ? 1 : 0.03;
  return prices;
}

const Way* cheapest_of(std::span<const Way* const> ways, const Prices& prices) {
  const Way* cheapest = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (const Way* way : ways) {
    double cost = 0;
    for (int r = 0; r < kMaxResources; ++r) cost += prices[r] * static_cast<double>(way->chain.loads[r]);
    if (cost < least) least = cost, cheapest = way;
  }
  return cheapest;
}

std::vector<const Way*> as_vector(std::span<const Way* const> ways) { return {ways.begin(), ways.end()}; }

// So many ways can be listed in some milliseconds: every option for every bucket.
constexpr std::int64_t kMaxWays = 20000;

// Trying everything, where there is little, may take so many times what a search may.
constexpr std::int64_t kBudgetOfEverything = 40;

class Search {
 public:
  explicit Search(Problem& problem)
      : problem_(problem), local_(&problem), greedy_(problem.simulated(), problem.levels()) {
    caps_ = fusion_caps(problem);
    budget_ = search_steps(problem);
  }

  SearchResult run() {
    result_.bound = quick_bound(problem_.for_bounds());
    floor_ns_ = result_.bound.step_ns + result_.bound.rounding_ns;
    local_.set_floor(floor_ns_);
    DensePlans dense = find_dense_plans(problem_, &local_);
    result_.dense_ns = dense.fastest_score.step_ns;
    starts_.push_back({dense.by_size_score, std::move(dense.by_size)});
    if (!local_.is_at_floor()) {
      start_by_prices();
      keep_best_starts();
      if (starts_.front().first.step_ns > floor_ns_) start_by_espresso();
      improve_starts();
    }
    if (!local_.is_at_floor()) {
      take_as_published();
      if (can_try_everything(problem_, kMaxWays)) {
        result_.is_exact = try_everything(problem_, &local_, local_.steps_done() + budget_ * kBudgetOfEverything);
      }
      if (problem_.options_considered() * problem_.tensors() <= kMaxWays) {
        try_every_option(problem_, &local_, local_.steps_done() + budget_ / 2);
        local_.improve(local_.spent() + budget_ / 4);
      }
    }
    local_.tidy(std::max(local_.spent() + budget_ / 4, budget_));  // what a search that ended early has left
    finish();
    return std::move(result_);
  }

 private:
  using Start = std::pair<Score, std::vector<Placed>>;
  static bool is_better(const Start& a, const Start& b) { return a.first < b.first; }

  void start_by_prices() {
    // Each choice with few buckets; then the two best of them with many (kFewBuckets), of the candidates that were best
    // and, where more buckets were clearly better than fewer, of all.
    std::array<Score, kPriceSets> best_of;
    Score best;
    bool is_more_better = false;
    for (const std::int64_t cap : caps_) {
      const auto buckets = fuse_up_to(problem_, cap, [](int, int) { return nullptr; }).size();
      const std::vector<int> in_use = candidates_in_use();
      std::vector<Start> plans;  // that differ
      std::array<int, kPriceSets> order;
      for (int i = 0; i < kPriceSets; ++i) order[i] = i;
      int tried = kPriceSets;
      if (buckets > kFewBuckets) {
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return best_of[a] < best_of[b]; });
        tried = 2;
      }
      const auto take = [&](int set, bool all_ways) {
        const Prices prices = prices_of(set, problem_.levels());
        std::vector<Placed> plan = fuse_up_to(problem_, cap, [&](int first, int last) {
          return all_ways ? cheapest_of(problem_.ways(first, last), prices)
                          : cheapest_of(ways_of(first, last, in_use), prices);
        });
        auto same = std::find_if(plans.begin(), plans.end(), [&](const Start& other) { return other.second == plan; });
        if (same == plans.end()) same = plans.insert(same, {local_.score(plan), std::move(plan)});
        best_of[set] = std::min(best_of[set], same->first);
      };
      for (int i = 0; i < tried; ++i) take(order[i], buckets <= kFewBuckets);
      for (int i = 0; i < tried && buckets > kFewBuckets && is_more_better; ++i) take(order[i], true);
      Start& best_at_cap = *std::min_element(plans.begin(), plans.end(), is_better);
      if (best_at_cap.first.step_ns == Simulator::kNever) continue;  // all of them break a limit
      is_more_better = best_at_cap.first.step_ns < best.step_ns - best.step_ns / kClearly;
      best = std::min(best, best_at_cap.first);
      if (buckets <= kFewBuckets) fusions_.push_back({best_at_cap.first, cap});
      starts_.push_back(std::move(best_at_cap));
      if (starts_.back().first.step_ns <= floor_ns_) break;
    }
  }

  // Of the best start so far.
  std::vector<int> candidates_in_use() const {
    std::vector<int> used;
    for (const Placed& placed : std::min_element(starts_.begin(), starts_.end(), is_better)->second) {
      const int candidate = placed.way->candidate;
      if (std::find(used.begin(), used.end(), candidate) == used.end()) used.push_back(candidate);
    }
    return used;
  }

  std::vector<const Way*> ways_of(int first, int last, const std::vector<int>& candidates) {
    std::vector<const Way*> ways = as_vector(problem_.plain_ways(first, last));
    for (const int candidate : candidates) {
      const Way* way = problem_.way_of(first, last, candidate);
      if (way != nullptr && way->is_encoded) ways.push_back(way);
    }
    return ways;
  }

  // Espresso's algorithms, with the ways worth considering: where few buckets made a good start, the best of what comes
  // of them is one more.
  void start_by_espresso() {
    std::stable_sort(fusions_.begin(), fusions_.end());
    if (fusions_.size() > kGreedyFusions) fusions_.resize(kGreedyFusions);
    Start best;
    for (const auto& [found, cap] : fusions_) {
      std::vector<Placed> plan = choose_as_espresso(
          cap, [&](int first, int last) { return as_vector(problem_.ways(first, last)); }, budget_ / 32);
      const Score score = local_.score(plan);
      if (score < best.first) best = {score, std::move(plan)};
    }
    if (!best.second.empty()) starts_.push_back(std::move(best));
  }

  // What the algorithms make on one device and of nothing fused, as published, if it is better.
  void take_as_published() {
    const auto on_one_device = [&](int first, int last) {
      std::vector<const Way*> ways = as_vector(problem_.ways(first, last));
      if (has_both_devices()) std::erase_if(ways, [](const Way* way) { return way->chain.loads[kCpuCodec] > 0; });
      return ways;
    };
    if (local_.offer(choose_as_espresso(0, on_one_device, budget_ / 8))) {
      result_.is_cut_short = !local_.improve(local_.spent() + budget_ / 4);
    }
  }

  std::vector<Placed> choose_as_espresso(std::int64_t cap, const WaysOf& ways_of, std::int64_t steps) {
    std::vector<Placed> plan = dense_plan(problem_, cap);
    choose_greedily(problem_, ways_of, &greedy_, greedy_.steps_done() + steps, &plan);
    if (has_both_devices()) offload_to_cpu(problem_, kGreedyCombinations, &plan);
    return plan;
  }

  bool has_both_devices() const {
    return problem_.model().home == OpDevice::kGpu &&
           std::any_of(problem_.codecs().begin(), problem_.codecs().end(), [](const CodecCost& codec) {
             return codec.runs_on(OpDevice::kGpu) && codec.runs_on(OpDevice::kCpu);
           });
  }

  // The best, and the dense one.
  void keep_best_starts() {
    const Start dense = starts_.front();
    std::stable_sort(starts_.begin(), starts_.end(), is_better);
    if (starts_.size() <= kStarts) return;
    const bool among_best = dense.first <= starts_[kStarts - 1].first;
    starts_.resize(kStarts);
    if (!among_best) starts_.back() = dense;
  }

  // Each start a little (of what may be spent, a twentieth), what came of the two best further (a fifth each), of the
  // better one to the end (two fifths). What is best early need not be so late.
  void improve_starts() {
    std::vector<Start> improved = {{local_.best(), local_.plan()}};
    const auto improve = [&](const Start& start, std::int64_t spend) {
      local_.start(start.second);
      result_.is_cut_short = !local_.improve(local_.spent() + spend);
      return Start{local_.best(), local_.plan()};
    };
    for (const Start& start : starts_) {
      improved.push_back(improve(start, budget_ / 20));
      if (local_.is_at_floor()) return;
    }
    std::stable_sort(improved.begin(), improved.end(), is_better);
    improved.resize(std::min(improved.size(), kFinalists));
    for (Start& start : improved) {
      start = improve(start, budget_ / 5);
      if (local_.is_at_floor()) return;
    }
    improve(*std::min_element(improved.begin(), improved.end(), is_better), budget_ * 2 / 5);
  }

  void finish() {
    result_.plan = local_.plan();
    result_.score = local_.best();
    const bool encodes = std::any_of(result_.plan.begin(), result_.plan.end(),
                                     [](const Placed& placed) { return placed.way->is_encoded; });
    if (!encodes) result_.dense_ns = result_.score.step_ns;
    result_.bound = lower_bound(problem_.for_bounds(), result_.bound, result_.score.step_ns);
    result_.steps_done = local_.steps_done() + greedy_.steps_done();
  }

  static constexpr std::int64_t kClearly = 64;  // by one part in so many
  static constexpr std::size_t kStarts = 4;
  static constexpr std::size_t kFinalists = 2;
  static constexpr std::size_t kGreedyFusions = 2;
  static constexpr std::int64_t kGreedyCombinations = 16;

  Problem& problem_;
  LocalSearch local_;
  Simulator greedy_;  // of Algorithm 1
  std::vector<Start> starts_;
  std::vector<std::pair<Score, std::int64_t>> fusions_;  // into few buckets: the best that was made of it; its cap
  std::vector<std::int64_t> caps_;
  std::int64_t budget_;
  std::int64_t floor_ns_ = 0;  // a plan as fast needs no better one
  SearchResult result_;
};

}  // namespace

std::int64_t search_steps(const Problem& problem) {
  const std::int64_t given = problem.constraints().search_steps;
  return given > 0 ? given : default_search_steps(problem.tensors());
}

SearchResult search(Problem& problem) { return Search(problem).run(); }

}  // namespace cortado
