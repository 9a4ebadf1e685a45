// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// TrialPredictions: what steps of settings on trial will take, said before they are made. Pure, so that all ranks, who
// share what it is told, say the same.
//
// The simulator tells of each setting what a step takes while the machine has one of some paces (candidates.h). It
// leans: what it leaves out is left out of all settings. So what is predicted for a trial is what was simulated, times
// what the other settings tried so far took over what was simulated for the pace that their steps turned out to have:
// the median of these n ratios, which counts n / (n + 1), and the simulator as it is the rest. Expected is the mean of
// two paces, that of the steps right before and that of the trials so far, in their mean: a machine that is slow just
// now need not stay so.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "session/pace.h"

namespace cortado {

class TrialPredictions {
 public:
  // All that a pace may be, in steps of the fourth root of two; between two of them times are interpolated.
  static constexpr std::array<double, 9> kPaces = {1 / kMostPace,
                                                   0.59460355750136053,
                                                   0.70710678118654752,
                                                   0.84089641525371454,
                                                   1,
                                                   1.1892071150027211,
                                                   1.4142135623730951,
                                                   1.6817928305074291,
                                                   kMostPace};
  static constexpr std::size_t kAsDense = 4;
  static_assert(kMostPace == 2 && kPaces[kAsDense] == 1);

  TrialPredictions() = default;
  explicit TrialPredictions(std::size_t settings) : settings_(settings) {}

  // What a step of a setting takes, for kPaces; each above 0. Once, before its first begin_trial().
  void set_simulated(int setting, std::span<const std::int64_t> simulated_ns);
  bool is_simulated(int setting) const { return !at(setting).simulated_ns.empty(); }

  // A trial of a simulated setting. `pace` is that of the steps right before it, and then that of its own steps, whose
  // median is `measured_ns`; nothing: not known. A trial whose pace is not known tells nothing of the others.
  void begin_trial(int setting, std::optional<double> pace);
  void end_trial(int setting, std::optional<double> pace, std::int64_t measured_ns);

  // Of a setting that was on trial, in the median of its trials: what was said before their steps; that without what
  // the others took. Of those whose pace is known: what would have been said had it been known then; and this pace over
  // the one expected (1 if none was known). -1, and 0: of no trial.
  std::int64_t predicted_ns(int setting) const;
  std::int64_t simulated_ns(int setting) const;
  std::int64_t predicted_at_pace_ns(int setting) const;
  double pace(int setting) const;

 private:
  struct Trial {
    double lean = 1, expected_pace = 1;
    std::optional<double> pace;  // these two of ended trials
    std::int64_t measured_ns = 0;
  };
  struct Setting {
    std::vector<std::int64_t> simulated_ns;  // by kPaces
    std::vector<Trial> trials;

    double at_pace_ns(double pace) const;
  };

  const Setting& at(int setting) const { return settings_[static_cast<std::size_t>(setting)]; }
  Setting& at(int setting) { return settings_[static_cast<std::size_t>(setting)]; }
  double lean_without(int setting) const;
  std::optional<double> mean_pace() const;  // of the trials whose pace is known

  std::vector<Setting> settings_;
};

}  // namespace cortado
