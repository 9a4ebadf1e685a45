// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Contest: which setting is tried next, and which has won. Pure, so that all ranks, who share the times, go the same
// way.
//
// Rounds. In the first, everybody is tried once, dense last and only if it may still win (its first steps have been
// measured before). In each further round those close to the best are tried again, in the opposite order, so that a
// slow spell of the machine hits none of them alone; and once more who was predicted to be faster than the one that is
// best so far. A few steps of one spell say little, and more of them more: what counts as close gets less from round to
// round. It ends when nobody is close, or after kRounds. Who would win against
// dense by little meets it in kSureRounds at least: what is lost by dense's slow spell is lost for good.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace cortado {

// Of two in the middle the smaller one; `values` may not be empty.
std::int64_t median_of(std::vector<std::int64_t> values);

class Contest {
 public:
  static constexpr int kRounds = 8;
  static constexpr int kSureRounds = 4;
  static constexpr double kMayWin = 1.3;  // dense, in the first rounds: its time over the best one's
  static constexpr double kClose = 0.25;  // share of the best one's time that may be added to it, over rounds so far

  // By contestant what was predicted, -1: nothing; dense is 0. `dense_ns` are times of steps it has made.
  Contest(std::vector<std::int64_t> predicted_ns, std::span<const std::int64_t> dense_ns);

  // Before anybody was tried: only these and dense take part.
  void keep_only(std::span<const int> contestants);

  // Another prediction, before the first trial.
  void predict(int contestant, std::int64_t predicted_ns) { predicted_ns_[index(contestant)] = predicted_ns; }

  // Who is tried next; -1: nobody, it is over.
  int next() const { return order_.empty() ? -1 : order_.back(); }

  // Times of steps of next().
  void note(std::span<const std::int64_t> step_ns);

  // next() could not be made, or loses too much; it takes no further part.
  void drop();

  // Of dense, in its turn, only what follows counts.
  void forget_dense() { times_[0].clear(); }

  // When it is over: one that was tried can't be made again, and has not won.
  void withdraw(int contestant) { times_[index(contestant)].clear(); }

  std::int64_t median_ns(int contestant) const;  // -1: not tried
  std::int64_t steps(int contestant) const { return static_cast<std::int64_t>(times_[index(contestant)].size()); }

  // The fastest of all but dense; 0 if none was tried.
  int best_other() const;

  // best_other(), if it saves at least `min_gain` of dense's time; else 0.
  int winner(double min_gain) const;

 private:
  static std::size_t index(int contestant) { return static_cast<std::size_t>(contestant); }
  int best() const;  // of those that were tried
  bool is_second_chance_due(int contestant) const;
  void advance();

  std::vector<std::int64_t> predicted_ns_;
  std::vector<std::vector<std::int64_t>> times_;
  std::vector<int> order_;  // of what is left of this round, last first
  int round_ = 1;
  bool dense_considered_ = false;
};

}  // namespace cortado
