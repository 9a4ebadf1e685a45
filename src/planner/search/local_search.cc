// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "planner/search/local_search.h"

#include <algorithm>
#include <numeric>

#include "core/check.h"

namespace cortado {

namespace {

void add(const Way& way, int sign, Score* score, PlanSums* sums, Loads* loads) {
  score->lossy_elems += sign * way.lossy_elems;
  score->busy_ns += sign * way.chain.own_ns;
  sums->memory_bytes += sign * way.chain.memory_bytes;
  sums->squared_error += sign * way.squared_error;
  for (int r = 0; r < kMaxResources; ++r) (*loads)[r] += sign * way.chain.loads[r];
}

// The longest step with which a plan is better that loses and occupies what `score` says.
std::int64_t longest_better_ns(Score score, const Score& than) {
  score.step_ns = than.step_ns;
  return than.step_ns - (score < than ? 0 : 1);
}

}  // namespace

SimulatedBucket simulated_bucket(const Problem& problem, const Placed& placed) {
  return {problem.ready_ns(placed.last), placed.way->chain.steps, problem.elems(placed.first, placed.last)};
}

LocalSearch::LocalSearch(Problem* problem) : problem_(*problem), simulator_(problem->simulated(), problem->levels()) {}

PlanSums LocalSearch::lay_out(std::span<const Placed> plan, Score* score) {
  PlanSums sums;
  Loads loads = {};
  scratch_.clear();
  for (const Placed& placed : plan) {
    scratch_.push_back(simulated_bucket(problem_, placed));
    add(*placed.way, 1, score, &sums, &loads);
  }
  return sums;
}

Score LocalSearch::score(std::span<const Placed> plan, const Score& to_beat) {
  Score score = {0, 0, 0};
  if (!is_allowed(lay_out(plan, &score))) return {};
  score.step_ns = simulator_.run(scratch_, longest_better_ns(score, to_beat));
  return score;
}

std::int64_t LocalSearch::step_ns(std::span<const Placed> plan, bool* is_allowed) {
  Score score = {0, 0, 0};
  *is_allowed = this->is_allowed(lay_out(plan, &score));
  return simulator_.run(scratch_);
}

bool LocalSearch::is_allowed(const PlanSums& sums) const {
  const PlannerConstraints& constraints = problem_.constraints();
  if (sums.memory_bytes > constraints.max_memory_bytes.value_or(sums.memory_bytes)) return false;
  if (!constraints.max_total_error.has_value()) return true;
  // Sums that were added and subtracted have roundings.
  return sums.squared_error <= *constraints.max_total_error * *constraints.max_total_error * (1 + 1e-9) + 1e-15;
}

// After which no bucket may arrive in a step of that length.
std::int64_t LocalSearch::last_arrival_ns(std::int64_t step_ns) const {
  const SimulatedJob& job = problem_.simulated();
  return step_ns - (job.overlap_forward ? 0 : job.optimizer_ns + job.forward_ns);
}

void LocalSearch::start(std::vector<Placed> plan) {
  plan_ = std::move(plan);
  best_ = {0, 0, 0};
  sums_ = {};
  Loads loads = {};
  for (const Placed& placed : plan_) add(*placed.way, 1, &best_, &sums_, &loads);
  lay_out_plan();
  best_.step_ns = simulator_.run_keeping(buckets_);
}

bool LocalSearch::offer(const std::vector<Placed>& plan) {
  if (!(score(plan, best_) < best_)) return false;
  start(plan);
  return true;
}

void LocalSearch::lay_out_plan() {
  buckets_.clear();
  for (const Placed& placed : plan_) buckets_.push_back(simulated_bucket(problem_, placed));
}

bool LocalSearch::improve(std::int64_t until) {
  for (bool helped = true; helped && !is_done(until);) {
    helped = move_ways(until);
    helped |= move_boundaries(until);
    if (!helped) helped = split_buckets(until);
    if (!helped) helped = move_groups(until);
    if (!helped) helped = swap_ways(until);
  }
  return is_at_floor() || spent() < until;
}

// As one bucket, which does not encode or goes as the first of them; else as few in each half. From the back: what
// comes after a change is simulated again. How many there are then.
std::size_t LocalSearch::merge_range(std::size_t at, std::size_t count, std::int64_t until) {
  if (count < 2 || spent() >= until) return count;
  const int first = plan_[at].first, last = plan_[at + count - 1].last;
  if (problem_.may_fuse(first, last)) {
    const std::span<const Way* const> plain = problem_.plain_ways(first, last);
    std::vector<const Way*> tried(plain.begin(), plain.end());
    const Way* same = problem_.way_of(first, last, plan_[at].way->candidate);
    if (same != nullptr && std::find(tried.begin(), tried.end(), same) == tried.end()) tried.push_back(same);
    for (const Way* way : tried) {
      const Placed merged = {first, last, way};
      if (try_replace(at, count, {&merged, 1})) return 1;
    }
  }
  const std::size_t right = merge_range(at + count / 2, count - count / 2, until);
  return merge_range(at, count / 2, until) + right;
}

void LocalSearch::tidy(std::int64_t until) {
  merge_range(0, plan_.size(), until);
  for (std::size_t k = plan_.size(); k-- > 0;) {
    for (const Way* way : ways(plan_[k].first, plan_[k].last)) {
      if (spent() >= until || way->lossy_elems >= plan_[k].way->lossy_elems) break;
      if (try_way(k, way)) break;
    }
  }
  for (std::size_t k = plan_.size(); k-- > 0;) {
    while (spent() < until && try_merge(k)) {
    }
  }
}

bool LocalSearch::try_replace(std::size_t at, std::size_t count, std::span<const Placed> with) {
  Score score = best_;
  PlanSums sums = sums_;
  Loads change = {};
  for (std::size_t k = at; k < at + count; ++k) add(*plan_[k].way, -1, &score, &sums, &change);
  for (const Placed& placed : with) add(*placed.way, 1, &score, &sums, &change);
  if (!is_allowed(sums)) return false;
  const std::int64_t limit_ns = longest_better_ns(score, best_);
  for (const Placed& placed : with) {
    if (problem_.ready_ns(placed.last) + placed.way->chain.own_ns > last_arrival_ns(limit_ns)) return false;
  }
  // What is ready earlier than before needs a state from before that.
  const std::size_t from = with.front().last < plan_[at].last && at > 0 ? at - 1 : at;
  if (count == with.size()) {
    const auto exchange = [&](std::size_t i) { std::swap(buckets_[at + i], scratch_[i]); };
    scratch_.clear();
    for (const Placed& placed : with) scratch_.push_back(simulated_bucket(problem_, placed));
    for (std::size_t i = 0; i < count; ++i) exchange(i);
    score.step_ns = simulator_.rerun(buckets_, from, change, limit_ns);
    for (std::size_t i = 0; i < count; ++i) exchange(i);
  } else {
    scratch_.assign(buckets_.begin(), buckets_.begin() + static_cast<std::ptrdiff_t>(at));
    for (const Placed& placed : with) scratch_.push_back(simulated_bucket(problem_, placed));
    scratch_.insert(scratch_.end(), buckets_.begin() + static_cast<std::ptrdiff_t>(at + count), buckets_.end());
    score.step_ns = simulator_.rerun(scratch_, from, change, limit_ns);
  }
  if (!(score < best_)) return false;
  scratch_plan_.assign(with.begin(), with.end());  // `with` may lie in plan_
  plan_.erase(plan_.begin() + static_cast<std::ptrdiff_t>(at), plan_.begin() + static_cast<std::ptrdiff_t>(at + count));
  plan_.insert(plan_.begin() + static_cast<std::ptrdiff_t>(at), scratch_plan_.begin(), scratch_plan_.end());
  best_ = score;
  sums_ = sums;
  lay_out_plan();
  CORTADO_CHECK(simulator_.rerun_keeping(buckets_, from, change) == best_.step_ns);
  return true;
}

bool LocalSearch::try_way(std::size_t bucket, const Way* way) {
  const Placed other = {plan_[bucket].first, plan_[bucket].last, way};
  return try_replace(bucket, 1, {&other, 1});
}

// Largest first: they have most to gain. Of equal ones the last, which is closest to the end of the step.
std::vector<std::size_t> LocalSearch::by_size() const {
  std::vector<std::size_t> order(plan_.size());
  std::iota(order.rbegin(), order.rend(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return problem_.elems(plan_[a].first, plan_[a].last) > problem_.elems(plan_[b].first, plan_[b].last);
  });
  return order;
}

bool LocalSearch::move_ways(std::int64_t until) {
  bool helped = false;
  for (const std::size_t k : by_size()) {
    for (const Way* way : ways(plan_[k].first, plan_[k].last)) {
      if (is_done(until)) return helped;
      if (way != plan_[k].way) helped |= try_way(k, way);
    }
  }
  return helped;
}

std::vector<const Way*> LocalSearch::likely_ways(int first, int last, std::size_t near) {
  std::vector<const Way*> likely;
  const auto take = [&](const Way* way) {
    if (way != nullptr && std::find(likely.begin(), likely.end(), way) == likely.end()) likely.push_back(way);
  };
  for (std::size_t k = near > 0 ? near - 1 : 0; k < std::min(near + 2, plan_.size()); ++k) {
    take(problem_.way_of(first, last, plan_[k].way->candidate));
  }
  return likely;
}

bool LocalSearch::try_merge(std::size_t at) {
  if (at + 1 >= plan_.size() || !problem_.may_fuse(plan_[at].first, plan_[at + 1].last)) return false;
  for (const Way* way : likely_ways(plan_[at].first, plan_[at + 1].last, at)) {
    const Placed merged = {plan_[at].first, plan_[at + 1].last, way};
    if (try_replace(at, 2, {&merged, 1})) return true;
  }
  return false;
}

bool LocalSearch::try_split(std::size_t at) {
  const Placed whole = plan_[at];
  if (whole.first == whole.last) return false;
  // After the first tensor, before the last, and where both parts have about as many bytes.
  int middle = whole.first;
  while (middle + 1 < whole.last && problem_.bytes(whole.first, middle) * 2 < problem_.bytes(whole.first, whole.last))
    ++middle;
  std::vector<int> ends = {middle, whole.last - 1, whole.first};
  ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
  // One part goes as the whole did, the other any way.
  for (const int end : ends) {
    const Way* left_same = problem_.way_of(whole.first, end, whole.way->candidate);
    const Way* right_same = problem_.way_of(end + 1, whole.last, whole.way->candidate);
    for (const Way* left : ways(whole.first, end)) {
      const Placed parts[] = {{whole.first, end, left}, {end + 1, whole.last, right_same}};
      if (right_same != nullptr && try_replace(at, 1, parts)) return true;
    }
    for (const Way* right : ways(end + 1, whole.last)) {
      const Placed parts[] = {{whole.first, end, left_same}, {end + 1, whole.last, right}};
      if (left_same != nullptr && try_replace(at, 1, parts)) return true;
    }
  }
  return false;
}

// Moves the boundary between a bucket and the next one.
bool LocalSearch::try_shift(std::size_t at) {
  if (at + 1 >= plan_.size() || !problem_.may_fuse(plan_[at].first, plan_[at + 1].last)) return false;
  bool helped = false;
  for (const int sign : {1, -1}) {
    for (int by = 1; by <= 64; by *= 2) {
      const Placed left = plan_[at], right = plan_[at + 1];
      const int end = left.last + sign * by;
      if (end < left.first || end >= right.last) break;
      const Way* left_way = problem_.way_of(left.first, end, left.way->candidate);
      const Way* right_way = problem_.way_of(end + 1, right.last, right.way->candidate);
      if (left_way == nullptr || right_way == nullptr) continue;
      const Placed shifted[] = {{left.first, end, left_way}, {end + 1, right.last, right_way}};
      helped |= try_replace(at, 2, shifted);
    }
  }
  return helped;
}

bool LocalSearch::move_boundaries(std::int64_t until) {
  bool helped = false;
  for (std::size_t k = 0; k < plan_.size() && !is_done(until); ++k) {
    while (try_merge(k)) helped = true;
    helped |= try_shift(k);
  }
  return helped;
}

bool LocalSearch::split_buckets(std::int64_t until) {
  bool helped = false;
  for (std::size_t k = 0; k < plan_.size() && !is_done(until); ++k) helped |= try_split(k);
  return helped;
}

// All buckets of one way, or those of them from one on or up to one, go another.
bool LocalSearch::move_groups(std::int64_t until) {
  std::vector<int> in_use;
  for (const Placed& placed : plan_) {
    if (std::find(in_use.begin(), in_use.end(), placed.way->candidate) == in_use.end())
      in_use.push_back(placed.way->candidate);
  }
  const auto total = static_cast<int>(problem_.candidates().size());
  for (const int from : in_use) {
    for (int to = 0; to < total; ++to) {
      if (to == from || (plain_only_ && problem_.candidates()[to].codec >= 0)) continue;
      if (is_done(until)) return false;
      std::vector<Placed> moved = plan_;
      bool differs = false;
      for (Placed& placed : moved) {
        if (placed.way->candidate != from) continue;
        const Way* way = problem_.way_of(placed.first, placed.last, to);
        if (way != nullptr) placed.way = way, differs = true;
      }
      if (differs && offer(moved)) return true;
    }
  }
  return false;
}

bool LocalSearch::swap_ways(std::int64_t until) {
  for (std::size_t a = 0; a < plan_.size(); ++a) {
    for (std::size_t b = a + 1; b < plan_.size(); ++b) {
      if (plan_[a].way->candidate == plan_[b].way->candidate) continue;
      if (is_done(until)) return false;
      const Way* to_a = problem_.way_of(plan_[a].first, plan_[a].last, plan_[b].way->candidate);
      const Way* to_b = problem_.way_of(plan_[b].first, plan_[b].last, plan_[a].way->candidate);
      if (to_a == nullptr || to_b == nullptr) continue;
      std::vector<Placed> swapped(plan_.begin() + static_cast<std::ptrdiff_t>(a),
                                  plan_.begin() + static_cast<std::ptrdiff_t>(b + 1));
      swapped.front().way = to_a;
      swapped.back().way = to_b;
      if (try_replace(a, swapped.size(), swapped)) return true;
    }
  }
  return false;
}

}  // namespace cortado
