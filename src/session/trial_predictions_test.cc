// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "session/trial_predictions.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace cortado {
namespace {

constexpr std::int64_t kLinksNs = 1'000'000, kComputationNs = 2'000'000;

// Computation takes as much longer as the machine is slower, links do not.
std::int64_t step_ns(double pace, std::int64_t computation_ns = kComputationNs) {
  return kLinksNs + std::llround(pace * static_cast<double>(computation_ns));
}

TrialPredictions simulated(int settings) {
  TrialPredictions predictions(static_cast<std::size_t>(settings));
  for (int s = 0; s < settings; ++s) {
    EXPECT_FALSE(predictions.is_simulated(s));
    std::vector<std::int64_t> by_pace_ns;
    for (const double pace : TrialPredictions::kPaces) by_pace_ns.push_back(step_ns(pace, (s + 1) * kComputationNs));
    predictions.set_simulated(s, by_pace_ns);
    EXPECT_TRUE(predictions.is_simulated(s));
  }
  return predictions;
}

TEST(TrialPredictions, AreForThePaceBeforeATrial) {
  for (const double pace : {0.5, 0.51, 0.9, 1.0, 1.1, 1.5, 1.99, 2.0}) {
    TrialPredictions predictions = simulated(2);
    predictions.begin_trial(1, pace);
    EXPECT_EQ(predictions.predicted_ns(1), step_ns(pace, 2 * kComputationNs)) << pace;
    EXPECT_EQ(predictions.predicted_at_pace_ns(1), -1) << "it is not known yet";
    predictions.end_trial(1, 1.25, 9'000'000);
    EXPECT_EQ(predictions.predicted_ns(1), step_ns(pace, 2 * kComputationNs)) << "what was said was said";
    EXPECT_EQ(predictions.simulated_ns(1), predictions.predicted_ns(1));
    EXPECT_EQ(predictions.predicted_at_pace_ns(1), step_ns(1.25, 2 * kComputationNs));
    EXPECT_DOUBLE_EQ(predictions.pace(1), 1.25 / pace);
  }
}

TEST(TrialPredictions, OfAnUnknownPaceAreAsOfDenseSteps) {
  TrialPredictions predictions = simulated(1);
  EXPECT_EQ(predictions.predicted_ns(0), -1) << "of no trial";
  predictions.begin_trial(0, std::nullopt);
  predictions.end_trial(0, std::nullopt, 9'000'000);
  EXPECT_EQ(predictions.predicted_ns(0), step_ns(1));
  EXPECT_EQ(predictions.predicted_at_pace_ns(0), -1);
  EXPECT_EQ(predictions.pace(0), 0);
}

// Of one setting half of it counts, of two two thirds, of three, of whom one is far off, three quarters of the one in
// the middle. What the setting itself took says nothing.
TEST(TrialPredictions, LeanAsTheOthersDid) {
  TrialPredictions predictions = simulated(4);
  const auto times = [](int setting, double factor) {
    return std::llround(factor * static_cast<double>(step_ns(1, (setting + 1) * kComputationNs)));
  };
  const auto expect_said = [&](int setting, double factor) {
    predictions.begin_trial(setting, 1);
    EXPECT_NEAR(static_cast<double>(predictions.predicted_ns(setting)), static_cast<double>(times(setting, factor)), 1);
    EXPECT_EQ(predictions.simulated_ns(setting), times(setting, 1));
  };
  expect_said(0, 1);
  predictions.end_trial(0, 1, times(0, 1.2));
  expect_said(1, 1 + 0.2 / 2);
  predictions.end_trial(1, 1, times(1, 1.4));
  expect_said(2, 1 + 0.3 * 2 / 3);
  predictions.end_trial(2, 1, times(2, 50));
  expect_said(3, 1 + 0.4 * 3 / 4);
  predictions.end_trial(3, 2, times(3, 9));
  EXPECT_NEAR(static_cast<double>(predictions.predicted_at_pace_ns(3)),
              1.3 * static_cast<double>(step_ns(2, 4 * kComputationNs)), 1);
}

// Steps of a slow machine that took what was simulated for it are no sign of a lean, and what took long for a reason
// that is not known says nothing; nor does a trial that has not ended.
TEST(TrialPredictions, DoNotLeanWithTheMachine) {
  TrialPredictions predictions = simulated(2);
  predictions.begin_trial(0, 1);
  predictions.end_trial(0, 1.5, step_ns(1.5));
  predictions.begin_trial(0, 1);
  predictions.end_trial(0, std::nullopt, 5 * step_ns(1));
  predictions.begin_trial(0, 1.7);
  predictions.begin_trial(1, 1.5);
  EXPECT_EQ(predictions.predicted_ns(1), step_ns(1.5, 2 * kComputationNs));
}

// A link that stood still tells nothing of the simulator.
TEST(TrialPredictions, LeanByTwoAtMost) {
  for (const std::int64_t factor : {10, -10}) {
    TrialPredictions predictions = simulated(2);
    predictions.begin_trial(0, 1);
    predictions.end_trial(0, 1, factor > 0 ? step_ns(1) * factor : step_ns(1) / -factor);
    predictions.begin_trial(1, 1);
    EXPECT_EQ(predictions.predicted_ns(1), step_ns(1, 2 * kComputationNs) * (factor > 0 ? 6 : 3) / 4);
  }
}

TEST(TrialPredictions, ExpectTheMeanOfBothPaces) {
  TrialPredictions predictions = simulated(3);
  predictions.begin_trial(0, 1.4);
  predictions.end_trial(0, 1.2, step_ns(1.2));
  predictions.begin_trial(1, 1);
  EXPECT_EQ(predictions.simulated_ns(1), step_ns(1.1, 2 * kComputationNs));
  predictions.end_trial(1, 0.8, step_ns(0.8, 2 * kComputationNs));
  EXPECT_DOUBLE_EQ(predictions.pace(1), 0.8 / 1.1);
  predictions.begin_trial(2, 1.6);
  EXPECT_EQ(predictions.predicted_ns(2), step_ns(1.3, 3 * kComputationNs));
  predictions.end_trial(2, std::nullopt, step_ns(9, 3 * kComputationNs));
  predictions.begin_trial(1, std::nullopt);
  EXPECT_EQ(predictions.simulated_ns(1), step_ns(1.05, 2 * kComputationNs)) << "of 1.1 and 1 the mean";
}

TEST(TrialPredictions, AreTheMedianOfTheTrials) {
  TrialPredictions predictions = simulated(2);
  for (const double pace : {1.0, 1.8, 1.1}) {
    predictions.begin_trial(0, pace);
    predictions.end_trial(0, 1, step_ns(1) * (pace == 1.8 ? 30 : 1));
  }
  EXPECT_EQ(predictions.predicted_ns(0), step_ns(1.05));
  EXPECT_DOUBLE_EQ(predictions.pace(0), 1 / 1.05);
  predictions.begin_trial(0, 1.2);
  EXPECT_EQ(predictions.predicted_ns(0), step_ns(1.075)) << "of two in the middle the mean";
  predictions.begin_trial(1, 1);
  EXPECT_EQ(predictions.predicted_ns(1), step_ns(1, 2 * kComputationNs)) << "one trial of three is far off";
}

}  // namespace
}  // namespace cortado
