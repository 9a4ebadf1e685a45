// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "session/contest.h"

#include <algorithm>
#include <utility>

namespace cortado {

namespace {

bool is_within(std::int64_t time_ns, std::int64_t best_ns, double factor) {
  return static_cast<double>(time_ns) <= factor * static_cast<double>(best_ns);
}

}  // namespace

std::int64_t median_of(std::vector<std::int64_t> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

Contest::Contest(std::vector<std::int64_t> predicted_ns, std::span<const std::int64_t> dense_ns)
    : predicted_ns_(std::move(predicted_ns)), times_(predicted_ns_.size()) {
  times_[0].assign(dense_ns.begin(), dense_ns.end());
  for (int c = static_cast<int>(times_.size()) - 1; c > 0; --c) order_.push_back(c);
  advance();
}

void Contest::keep_only(std::span<const int> contestants) {
  std::erase_if(order_,
                [&](int c) { return std::find(contestants.begin(), contestants.end(), c) == contestants.end(); });
}

void Contest::note(std::span<const std::int64_t> step_ns) {
  std::vector<std::int64_t>& times = times_[index(next())];
  times.insert(times.end(), step_ns.begin(), step_ns.end());
  order_.pop_back();
  advance();
}

void Contest::drop() {
  times_[index(next())].clear();
  order_.pop_back();
  advance();
}

std::int64_t Contest::median_ns(int contestant) const {
  const std::vector<std::int64_t>& times = times_[index(contestant)];
  return times.empty() ? -1 : median_of(times);
}

int Contest::best() const {
  const int other = best_other();
  return other != 0 && (times_[0].empty() || median_ns(other) < median_ns(0)) ? other : 0;
}

// A slow spell may be longer than a trial.
bool Contest::is_second_chance_due(int contestant) const {
  const std::int64_t predicted_ns = predicted_ns_[index(contestant)];
  return predicted_ns >= 0 && predicted_ns < predicted_ns_[index(best())];
}

int Contest::best_other() const {
  int best = 0;
  for (int c = 1; c < static_cast<int>(times_.size()); ++c) {
    if (times_[index(c)].empty()) continue;
    if (best == 0 || median_ns(c) < median_ns(best)) best = c;
  }
  return best;
}

int Contest::winner(double min_gain) const {
  const int best = best_other();
  if (best == 0) return 0;
  return is_within(median_ns(best), median_ns(0), 1 - min_gain) ? best : 0;
}

void Contest::advance() {
  if (!order_.empty()) return;
  const bool others_tried = best_other() != 0;
  if (round_ == 1 && others_tried && !dense_considered_) {
    dense_considered_ = true;
    if (is_within(median_ns(0), median_ns(best()), kMayWin)) {
      order_ = {0};
      return;
    }
  }
  if (!others_tried || round_ == kRounds) return;
  const std::int64_t best_ns = median_ns(best());
  const double closeness = 1 + kClose / round_;
  const bool is_dense_close = round_ < kSureRounds && is_within(median_ns(0), best_ns, kMayWin);
  std::vector<int> close;
  for (int c = 0; c < static_cast<int>(times_.size()); ++c) {
    const double within = c == 0 && is_dense_close ? kMayWin : closeness;
    if (times_[index(c)].empty()) continue;
    const bool has_second_chance = round_ == 1 && is_second_chance_due(c);
    if (has_second_chance || is_within(median_ns(c), best_ns, within)) close.push_back(c);
  }
  ++round_;
  if (close.size() < 2) return;
  // The order is worked off from the back: in even rounds the last contestant is first.
  if (round_ % 2 != 0) std::reverse(close.begin(), close.end());
  order_ = std::move(close);
}

}  // namespace cortado
