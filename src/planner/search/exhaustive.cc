// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "planner/search/exhaustive.h"

#include <algorithm>

namespace cortado {

namespace {

// Every option with every codec.
std::vector<int> all_candidates(Problem& problem) {
  std::vector<int> candidates;
  for (int codec = -1; codec < static_cast<int>(problem.codecs().size()); ++codec) {
    for (Option& option : generate_options(problem.space_of(codec))) {
      if ((option.encodes() > 0) != (codec >= 0)) continue;
      candidates.push_back(problem.add_candidate({codec, std::move(option)}));
    }
  }
  return candidates;
}

class BranchAndBound {
 public:
  BranchAndBound(Problem& problem, LocalSearch* local) : problem_(problem), local_(*local), candidates_(all_candidates(problem)) {
    const int n = problem.tensors();
    ways_.resize(static_cast<std::size_t>(n) * n);
    least_from_.resize(static_cast<std::size_t>(n) + 1);
    for (int first = n - 1; first >= 0; --first) {
      least_from_[first].fill(Simulator::kNever);
      for (int last = first; last < n && problem.may_fuse(first, last); ++last) {
        for (const int candidate : candidates_) {
          const Way* way = problem.way_of(first, last, candidate);
          if (way == nullptr) continue;
          ways(first, last).push_back(way);
          for (int r = 0; r < kMaxResources; ++r) {
            least_from_[first][r] = std::min(least_from_[first][r], way->chain.loads[r] + least_from_[last + 1][r]);
          }
        }
        // Short ones first: they make good bounds early.
        std::stable_sort(ways(first, last).begin(), ways(first, last).end(),
                         [](const Way* a, const Way* b) { return a->chain.own_ns < b->chain.own_ns; });
      }
    }
  }

  void run() { place_from(0, {}); }

 private:
  std::vector<const Way*>& ways(int first, int last) { return ways_[static_cast<std::size_t>(first) * problem_.tensors() + last]; }

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
    if (!can_be_better(first, loads)) return;
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
  std::vector<int> candidates_;
  std::vector<std::vector<const Way*>> ways_;  // [first * tensors + last]
  std::vector<Loads> least_from_;              // of the tensors from each on
  std::vector<Placed> plan_;
};

}  // namespace

bool can_try_everything(const Problem& problem, std::int64_t max_plans) {
  // Plans of n tensors with c candidates: c of the last bucket, and before it nothing or any plan.
  double plans = 0;
  const auto candidates = static_cast<double>(problem.options_considered());
  for (int n = 0; n < problem.tensors() && plans <= static_cast<double>(max_plans); ++n) plans = candidates * (1 + plans) + plans;
  return plans <= static_cast<double>(max_plans);
}

void try_everything(Problem& problem, LocalSearch* local) { BranchAndBound(problem, local).run(); }

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
