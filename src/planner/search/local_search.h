// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Improves a plan by small changes, each judged by the simulator: a bucket goes another way, buckets are merged, split
// or shifted against each other, two exchange their ways, all of one way go another. Deterministic: what it may spend
// is counted in simulated operations, and in ways made at as many of these as take the time. One thread at a time.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "planner/search/problem.h"

namespace cortado {

// Sums over a plan that constraints limit.
struct PlanSums {
  std::int64_t memory_bytes = 0;
  double squared_error = 0;
};

class LocalSearch {
 public:
  explicit LocalSearch(Problem* problem);

  // The score of a plan: buckets in order that cover all tensors. If it doesn't beat the other one, its time may be any
  // with which it doesn't.
  Score score(std::span<const Placed> plan, const Score& to_beat = {});
  // Of a plan that may break a limit of the constraints, too; then *is_allowed is false.
  std::int64_t step_ns(std::span<const Placed> plan, bool* is_allowed);

  // Continues from `plan`, which keeps to the constraints.
  void start(std::vector<Placed> plan);
  // As start(), if it is better than what there is and keeps to the constraints. True: it was.
  bool offer(const std::vector<Placed>& plan);
  // Until nothing helps, `spent()` reaches `until`, or the plan takes no longer than the floor. False: for what it
  // spent.
  bool improve(std::int64_t until);
  // Whether buckets may go only such ways as don't encode, from now on.
  void set_plain_only(bool on) { plain_only_ = on; }
  // Once a plan is as fast, there is nothing to improve.
  void set_floor(std::int64_t step_ns) { floor_ns_ = step_ns; }
  bool is_at_floor() const { return best_.step_ns <= floor_ns_; }
  // Encodes less, and merges buckets, where that costs no time.
  void tidy(std::int64_t until);

  // Lets one bucket go another way if that is better. True: it was.
  bool try_way(std::size_t bucket, const Way* way);

  const std::vector<Placed>& plan() const { return plan_; }
  const Score& best() const { return best_; }
  std::int64_t steps_done() const { return simulator_.steps_done(); }
  std::int64_t spent() const { return steps_done() + kStepsOfWay * problem_.ways_made(); }

 private:
  // PERF: a way takes about 0.4 us to make, an operation 27 ns to simulate (a Xeon).
  static constexpr std::int64_t kStepsOfWay = 16;

  std::span<const Way* const> ways(int first, int last) {
    return plain_only_ ? problem_.plain_ways(first, last) : problem_.ways(first, last);
  }
  // The kinds of move; true if one has helped.
  bool move_ways(std::int64_t until);
  bool move_boundaries(std::int64_t until);
  bool split_buckets(std::int64_t until);
  bool move_groups(std::int64_t until);
  bool swap_ways(std::int64_t until);
  bool is_done(std::int64_t until) const { return is_at_floor() || spent() >= until; }
  bool is_allowed(const PlanSums& sums) const;
  // To scratch_; what it adds up to.
  PlanSums lay_out(std::span<const Placed> plan, Score* score);
  std::int64_t last_arrival_ns(std::int64_t step_ns) const;
  // Puts `with` in the place of plan_[at, at + count) if that is better.
  bool try_replace(std::size_t at, std::size_t count, std::span<const Placed> with);
  // The ways worth trying for a bucket: those of its neighbours.
  std::vector<const Way*> likely_ways(int first, int last, std::size_t near);
  bool try_merge(std::size_t at);
  std::size_t merge_range(std::size_t at, std::size_t count, std::int64_t until);
  bool try_split(std::size_t at);
  bool try_shift(std::size_t at);
  std::vector<std::size_t> by_size() const;
  void lay_out_plan();  // to buckets_

  Problem& problem_;
  Simulator simulator_;
  std::vector<Placed> plan_;
  std::vector<SimulatedBucket> buckets_;  // of plan_
  Score best_;
  PlanSums sums_;
  std::int64_t floor_ns_ = 0;
  bool plain_only_ = false;
  std::vector<Placed> scratch_plan_;
  std::vector<SimulatedBucket> scratch_;
};

// The bucket as the simulator sees it.
SimulatedBucket simulated_bucket(const Problem& problem, const Placed& placed);

// Buckets of at most `cap_bytes`, or of one tensor where it is larger; 0: one tensor each. With `choose(first, last)`
// as the way of each.
template <typename Choose>
std::vector<Placed> fuse_up_to(Problem& problem, std::int64_t cap_bytes, Choose choose) {
  std::vector<Placed> plan;
  for (int first = 0; first < problem.tensors();) {
    int last = first;
    while (last + 1 < problem.tensors() && problem.bytes(first, last + 1) <= cap_bytes &&
           problem.may_fuse(first, last + 1)) {
      ++last;
    }
    plan.push_back({first, last, choose(first, last)});
    first = last + 1;
  }
  return plan;
}

}  // namespace cortado
