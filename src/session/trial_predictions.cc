// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "session/trial_predictions.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"

namespace cortado {

namespace {

constexpr double kMostLean = 2;  // what took longer than so many times what was simulated was held up

// Of two in the middle the mean; nothing of none.
std::optional<double> middle_of(std::vector<double> values) {
  if (values.empty()) return std::nullopt;
  std::sort(values.begin(), values.end());
  return (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
}

std::int64_t as_ns(std::optional<double> value) { return value.has_value() ? std::llround(*value) : -1; }

}  // namespace

void TrialPredictions::set_simulated(int setting, std::span<const std::int64_t> simulated_ns) {
  CORTADO_CHECK(simulated_ns.size() == kPaces.size());
  at(setting).simulated_ns.assign(simulated_ns.begin(), simulated_ns.end());
}

double TrialPredictions::Setting::at_pace_ns(double pace) const {
  const auto above = std::upper_bound(kPaces.begin() + 1, kPaces.end() - 1, pace);
  const auto i = static_cast<std::size_t>(above - kPaces.begin());
  const double part = std::clamp((pace - kPaces[i - 1]) / (kPaces[i] - kPaces[i - 1]), 0.0, 1.0);
  return std::lerp(static_cast<double>(simulated_ns[i - 1]), static_cast<double>(simulated_ns[i]), part);
}

void TrialPredictions::begin_trial(int setting, std::optional<double> pace) {
  const std::optional<double> of_trials = mean_pace();
  const double recent = pace.value_or(of_trials.value_or(1));
  const double expected_pace = (recent + of_trials.value_or(recent)) / 2;
  at(setting).trials.push_back({.lean = lean_without(setting), .expected_pace = expected_pace, .pace = {}});
}

void TrialPredictions::end_trial(int setting, std::optional<double> pace, std::int64_t measured_ns) {
  Trial& trial = at(setting).trials.back();
  trial.pace = pace;
  trial.measured_ns = measured_ns;
}

double TrialPredictions::lean_without(int setting) const {
  std::vector<double> of_settings;
  for (const Setting& other : settings_) {
    if (&other == &at(setting)) continue;
    std::vector<double> of_trials;
    for (const Trial& trial : other.trials) {
      if (!trial.pace.has_value()) continue;
      of_trials.push_back(static_cast<double>(trial.measured_ns) / other.at_pace_ns(*trial.pace));
    }
    const std::optional<double> ratio = middle_of(std::move(of_trials));
    if (ratio.has_value()) of_settings.push_back(std::clamp(*ratio, 1 / kMostLean, kMostLean));
  }
  const auto count = static_cast<double>(of_settings.size());
  return 1 + (middle_of(std::move(of_settings)).value_or(1) - 1) * count / (count + 1);
}

std::optional<double> TrialPredictions::mean_pace() const {
  double sum = 0;
  int count = 0;
  for (const Setting& setting : settings_) {
    for (const Trial& trial : setting.trials) {
      if (!trial.pace.has_value()) continue;
      sum += *trial.pace;
      ++count;
    }
  }
  return count > 0 ? std::optional(sum / count) : std::nullopt;
}

std::int64_t TrialPredictions::predicted_ns(int setting) const {
  std::vector<double> ns;
  for (const Trial& trial : at(setting).trials) ns.push_back(trial.lean * at(setting).at_pace_ns(trial.expected_pace));
  return as_ns(middle_of(std::move(ns)));
}

std::int64_t TrialPredictions::simulated_ns(int setting) const {
  std::vector<double> ns;
  for (const Trial& trial : at(setting).trials) ns.push_back(at(setting).at_pace_ns(trial.expected_pace));
  return as_ns(middle_of(std::move(ns)));
}

std::int64_t TrialPredictions::predicted_at_pace_ns(int setting) const {
  std::vector<double> ns;
  for (const Trial& trial : at(setting).trials) {
    if (trial.pace.has_value()) ns.push_back(trial.lean * at(setting).at_pace_ns(*trial.pace));
  }
  return as_ns(middle_of(std::move(ns)));
}

double TrialPredictions::pace(int setting) const {
  std::vector<double> expected, own;
  for (const Trial& trial : at(setting).trials) {
    if (!trial.pace.has_value()) continue;
    expected.push_back(trial.expected_pace);
    own.push_back(*trial.pace);
  }
  if (own.empty()) return 0;
  return *middle_of(std::move(own)) / *middle_of(std::move(expected));
}

}  // namespace cortado
