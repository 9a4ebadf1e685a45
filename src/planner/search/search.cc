// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "planner/search/search.h"

#include <algorithm>
#include <limits>

#include "planner/search/exhaustive.h"
#include "planner/search/local_search.h"
#include "planner/search/strategies.h"

namespace cortado {

namespace {

// Plans of more buckets cost more to simulate, and are rarely good: only the best choices of the others are tried
// there.
constexpr std::size_t kFewBuckets = 64;

// What a bucket takes of each resource, weighted: the different choices that starting plans make.
using Prices = std::array<double, kMaxResources>;

Prices prices_of(int scarce, int levels) {
  Prices prices;
  prices.fill(0.03);
  if ((scarce & 1) != 0) prices[kGpuCodec] = 1;
  if ((scarce & 2) != 0) prices[kCpuCodec] = prices[kDeviceToHost] = prices[kHostToDevice] = 1;
  if ((scarce & 4) != 0) prices[kLink + levels - 1] = 1;
  for (int l = 0; (scarce & 8) != 0 && l + 1 < levels; ++l) prices[kLink + l] = 1;
  return prices;
}

const Way* cheapest_way(Problem& problem, int first, int last, const Prices& prices) {
  const Way* cheapest = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (const Way& way : problem.ways(first, last)) {
    double cost = 0;
    for (int r = 0; r < kMaxResources; ++r) cost += prices[r] * static_cast<double>(way.chain.loads[r]);
    if (cost < least) least = cost, cheapest = &way;
  }
  return cheapest;
}

// So many ways can be listed in some milliseconds: every option for every bucket.
constexpr std::int64_t kMaxWays = 20000;

// Trying everything, where there is little, may take so many times what a search may.
constexpr std::int64_t kBudgetOfEverything = 16;

class Search {
 public:
  explicit Search(Problem& problem) : problem_(problem), local_(&problem) {
    caps_ = fusion_caps(problem);
    budget_ = problem.constraints().search_steps;
    if (budget_ == 0) budget_ = 80000 + 200 * static_cast<std::int64_t>(problem.tensors());
  }

  SearchResult run() {
    start_dense();
    result_.bound = quick_bound(problem_.for_bounds());
    const std::int64_t slack_ns = can_try_everything(problem_, kMaxWays) ? 0 : result_.bound.step_ns / kSlackOfBound;
    local_.set_floor(result_.bound.step_ns + slack_ns);
    if (!local_.is_at_floor()) {
      start_by_prices();
      improve_starts();
      if (can_try_everything(problem_, kMaxWays)) {
        result_.is_exact = try_everything(problem_, &local_, local_.steps_done() + budget_ * kBudgetOfEverything);
      }
      if (problem_.options_considered() * problem_.tensors() <= kMaxWays) {
        try_every_option(problem_, &local_, local_.steps_done() + budget_ / 2);
        local_.improve(local_.steps_done() + budget_ / 4);
      }
    }
    local_.tidy(local_.steps_done() + budget_ / 4);
    finish();
    return std::move(result_);
  }

 private:
  void start_dense() {
    std::vector<Placed> best;
    Score score;
    for (const std::int64_t cap : caps_) {
      std::vector<Placed> plan =
          fuse_up_to(problem_, cap, [&](int first, int last) { return fastest_dense_way(problem_, first, last); });
      const Score found = local_.score(plan);
      if (found < score) score = found, best = std::move(plan);
    }
    result_.dense_ns = score.step_ns;
    starts_.push_back({score, best});  // where Espresso's Algorithm 1 begins, too
    local_.start(std::move(best));
  }

  void start_by_prices() {
    // Each choice with few buckets; then the two best of them with many.
    std::array<Score, 16> best_of;
    for (const std::int64_t cap : caps_) {
      const auto buckets = fuse_up_to(problem_, cap, [](int, int) { return nullptr; }).size();
      Start best_at_cap;
      std::array<int, 16> order;
      for (int i = 0; i < 16; ++i) order[i] = i;
      int tried = 16;
      if (buckets > kFewBuckets) {
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return best_of[a] < best_of[b]; });
        tried = 2;
      }
      for (int i = 0; i < tried; ++i) {
        const Prices prices = prices_of(order[i], problem_.levels());
        const std::vector<Placed> plan =
            fuse_up_to(problem_, cap, [&](int first, int last) { return cheapest_way(problem_, first, last, prices); });
        const Score score = local_.score(plan);
        best_of[order[i]] = std::min(best_of[order[i]], score);
        if (score < best_at_cap.first) best_at_cap = {score, plan};
      }
      if (best_at_cap.second.empty()) continue;  // all of them break a limit
      starts_.push_back(std::move(best_at_cap));
      if (starts_.back().first.step_ns <= result_.bound.step_ns) break;
    }
  }

  // Each of the best starts and the dense one a little, the best of what comes of them to the end.
  void improve_starts() {
    const Start dense = starts_.front();
    std::stable_sort(starts_.begin(), starts_.end(), [](const Start& a, const Start& b) { return a.first < b.first; });
    const bool among_best = dense.first <= starts_[std::min(starts_.size(), kStarts) - 1].first;
    if (!among_best) starts_[kStarts - 1] = dense;
    Score best = local_.best();
    std::vector<Placed> plan = local_.plan();
    for (std::size_t i = 0; i < std::min(starts_.size(), kStarts); ++i) {
      local_.start(starts_[i].second);
      local_.improve(local_.steps_done() + budget_ / static_cast<std::int64_t>(2 * kStarts));
      if (local_.best() < best) best = local_.best(), plan = local_.plan();
      if (local_.is_at_floor()) break;
    }
    local_.start(std::move(plan));
    local_.improve(local_.steps_done() + budget_ / 2);
  }

  void finish() {
    result_.plan = local_.plan();
    result_.score = local_.best();
    const bool encodes = std::any_of(result_.plan.begin(), result_.plan.end(),
                                     [](const Placed& placed) { return placed.way->is_encoded; });
    if (!encodes) result_.dense_ns = result_.score.step_ns;
    result_.bound = lower_bound(problem_.for_bounds(), result_.bound, result_.score.step_ns);
    result_.steps_done = local_.steps_done();
  }

  using Start = std::pair<Score, std::vector<Placed>>;
  static constexpr std::size_t kStarts = 4;

  Problem& problem_;
  LocalSearch local_;
  std::vector<Start> starts_;
  std::vector<std::int64_t> caps_;
  std::int64_t budget_;
  SearchResult result_;
};

}  // namespace

SearchResult search(Problem& problem) { return Search(problem).run(); }

}  // namespace cortado
