// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "planner/search/exhaustive.h"

#include <algorithm>

namespace cortado {

namespace {

// Every option with every codec.
std::vector<int> all_candidates(Problem& problem) {
  std::vector<int> candidates;
  for (int codec = -1; codec < static_cast<int>(problem.codecs().size()); ++codec) {
    for (Option& option : problem.options_of(codec)) {
      candidates.push_back(problem.add_candidate({codec, std::move(option)}));
    }
  }
  return candidates;
}

class BranchAndBound {
 public:
  BranchAndBound(Problem& problem, LocalSearch* local, std::int64_t until_steps)
      : problem_(problem), local_(*local), until_steps_(until_steps) {
    const int n = problem.tensors();
    const std::vector<int> candidates = all_candidates(problem);
    ways_.resize(static_cast<std::size_t>(n) * n);
    least_from_.resize(static_cast<std::size_t>(n) + 1);
    std::vector<double> plans(static_cast<std::size_t>(n) + 1, 1);  // from each tensor on
    std::vector<double> plans_of_unbeaten = plans;
    for (int first = n - 1; first >= 0; --first) {
      least_from_[first].fill(Simulator::kNever);
      plans[first] = plans_of_unbeaten[first] = 0;
      for (int last = first; last < n && problem.may_fuse(first, last); ++last) {
        std::vector<const Way*>& list = ways(first, last);
        for (const int candidate : candidates) {
          const Way* way = problem.way_of(first, last, candidate);
          if (way == nullptr) continue;
          list.push_back(way);
          for (int r = 0; r < kMaxResources; ++r) {
            least_from_[first][r] = std::min(least_from_[first][r], way->chain.loads[r] + least_from_[last + 1][r]);
          }
        }
        // Short ones first: they make good bounds early, and beat most of the others.
        std::stable_sort(list.begin(), list.end(),
                         [](const Way* a, const Way* b) { return a->chain.own_ns < b->chain.own_ns; });
        plans[first] += static_cast<double>(list.size()) * plans[last + 1];
        plans_of_unbeaten[first] += static_cast<double>(unbeaten(list).size()) * plans_of_unbeaten[last + 1];
      }
    }
    plans_ = plans[0];
    plans_of_unbeaten_ = plans_of_unbeaten[0];
  }

  // First the plans of ways that no other one beats: they are few, and the best of them cuts off most of the others.
  // True: everything was tried.
  bool run() {
    if (plans_of_unbeaten_ > kMaxUnbeaten) return false;
    const std::vector<std::vector<const Way*>> all = ways_;
    for (std::vector<const Way*>& list : ways_) list = unbeaten(list);
    place_from(0, {});
    if (plans_ > kMaxPlans) return false;
    ways_ = all;
    place_from(0, {});
    return local_.steps_done() < until_steps_;
  }

 private:
  // Where there are more it would give up with nothing proved. Bounds cut off most of all plans, few of the unbeaten.
  static constexpr double kMaxPlans = 1e7, kMaxUnbeaten = 1e5;

  std::vector<const Way*> unbeaten(const std::vector<const Way*>& by_own_time) const {
    std::vector<const Way*> kept;
    for (const Way* way : by_own_time) {
      if (std::none_of(kept.begin(), kept.end(), [&](const Way* other) { return problem_.beats(*other, *way); }))
        kept.push_back(way);
    }
    return kept;
  }

  std::vector<const Way*>& ways(int first, int last) {
    return ways_[static_cast<std::size_t>(first) * problem_.tensors() + last];
  }

  // No resource is done before it has done what is placed and the least of what is not.
  bool can_be_better(int first, const Loads& loads) const {
    const std::int64_t best_ns = local_.best().step_ns;
    for (int r = 0; r < kMaxResources; ++r) {
      const std::int64_t servers = r == kCpuCodec ? problem_.simulated().cpu_workers : 1;
      if ((loads[r] + least_from_[first][r]) / servers > best_ns) return false;
    }
    return true;
  }

  void place_from(int first, const Loads& loads) {
    if (local_.steps_done() >= until_steps_ || !can_be_better(first, loads)) return;
    if (first == problem_.tensors()) {
      local_.offer(plan_);
      return;
    }
    for (int last = first; last < problem_.tensors() && problem_.may_fuse(first, last); ++last) {
      for (const Way* way : ways(first, last)) {
        if (problem_.ready_ns(last) + way->chain.own_ns > local_.best().step_ns) break;  // and so do the rest
        Loads with = loads;
        for (int r = 0; r < kMaxResources; ++r) with[r] += way->chain.loads[r];
        plan_.push_back({first, last, way});
        place_from(last + 1, with);
        plan_.pop_back();
      }
    }
  }

  Problem& problem_;
  LocalSearch& local_;
  std::int64_t until_steps_;
  double plans_ = 0, plans_of_unbeaten_ = 0;
  std::vector<std::vector<const Way*>> ways_;  // [first * tensors + last]
  std::vector<Loads> least_from_;              // of the tensors from each on
  std::vector<Placed> plan_;
};

}  // namespace

bool can_try_everything(const Problem& problem, std::int64_t max_ways) {
  const std::int64_t n = problem.tensors();
  return n <= max_ways && problem.options_considered() * n * (n + 1) / 2 <= max_ways;
}

bool try_everything(Problem& problem, LocalSearch* local, std::int64_t until_steps) {
  return BranchAndBound(problem, local, until_steps).run();
}

void try_every_option(Problem& problem, LocalSearch* local, std::int64_t until_steps) {
  const std::vector<int> candidates = all_candidates(problem);
  for (bool helped = true; helped;) {
    helped = false;
    for (std::size_t k = 0; k < local->plan().size(); ++k) {
      for (const int candidate : candidates) {
        if (local->steps_done() >= until_steps || local->is_at_floor()) return;
        const Placed placed = local->plan()[k];
        const Way* way = problem.way_of(placed.first, placed.last, candidate);
        if (way == nullptr || way == placed.way) continue;
        helped |= local->try_way(k, way);
      }
    }
  }
}

}  // namespace cortado
