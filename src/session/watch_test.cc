// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "session/watch.h"

#include <gtest/gtest.h>

#include <vector>

namespace cortado {
namespace {

using Finding = Watch::Finding;
constexpr Finding kNothing = Finding::kNothing;

// Steps as long as expected, some of which lose too much.
TEST(Watch, OneLossyComparisonIsNone) {
  Watch watch(0.25);
  watch.restart(100, 100);
  std::vector<Finding> found;
  for (const bool is_lossy : {true, false, true, true}) found.push_back(watch.note(100, is_lossy, false));
  EXPECT_EQ(found, (std::vector<Finding>{kNothing, kNothing, kNothing, Finding::kLossy}));
}

TEST(Watch, FasterIsDriftToo) {
  for (const std::int64_t step_ns : {126, 79}) {
    Watch watch(0.25);
    watch.restart(100, 100);
    EXPECT_EQ(watch.note(step_ns, false, false), kNothing);
    EXPECT_EQ(watch.note(step_ns, false, false), Finding::kDrifted) << step_ns;
  }
  for (const std::int64_t step_ns : {125, 80}) {
    Watch watch(0.25);
    watch.restart(100, 100);
    for (int i = 0; i < 5; ++i) EXPECT_EQ(watch.note(step_ns, false, false), kNothing) << step_ns;
  }
}

// What was expected is what won took; what was measured is older, and drift is from there.
TEST(Watch, DriftIsFromWhatWasMeasured) {
  Watch watch(0.25);
  watch.restart(/*expected_ns=*/120, /*measured_ns=*/100);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(watch.note(124, false, true), kNothing);
  EXPECT_EQ(watch.note(130, false, false), kNothing);
  EXPECT_EQ(watch.note(130, false, false), Finding::kDrifted);
  EXPECT_EQ(watch.measured_ns(), 100);
  EXPECT_EQ(watch.expected_ns(), 120);
}

TEST(Watch, IsBeatenOnlyWhereOthersWereFaster) {
  Watch watch(0.5);
  watch.restart(100, 100);
  for (const bool others : {true, false, true}) EXPECT_EQ(watch.note(111, false, others), kNothing);
  EXPECT_EQ(watch.note(111, false, true), Finding::kBeaten);
  watch.restart(100, 100);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(watch.note(110, false, true), kNothing);  // not slower by kSlower
}

// 2, 5, 9, 17, 33, 65 and again 65 comparisons after a decision: a machine whose speed swings does not keep changing
// its mind. Retries wait by themselves.
TEST(Watch, FindsLaterFromTimeToTime) {
  Watch watch(0.25);
  for (const int expected : {2, 5, 9, 17, 33, 65, 65}) {
    watch.restart(100, 100);
    int comparisons = 1;
    while (watch.note(200, false, false) != Finding::kDrifted) ++comparisons;
    EXPECT_EQ(comparisons, expected);
  }
  for (const int expected : {2, 5}) {
    watch.restart(100, 100);
    int comparisons = 1;
    while (watch.note(115, false, true) != Finding::kBeaten) ++comparisons;
    EXPECT_EQ(comparisons, expected);
  }
}

TEST(Watch, TheFirstComparisonTellsWhatIsNotKnown) {
  Watch watch(0.25);
  watch.restart(Watch::kFirstTells, Watch::kFirstTells);
  EXPECT_EQ(watch.note(700, false, true), kNothing);
  EXPECT_EQ(watch.expected_ns(), 700);
  EXPECT_EQ(watch.measured_ns(), 700);
  watch.note(900, false, false);
  EXPECT_EQ(watch.note(900, false, false), Finding::kDrifted);
}

}  // namespace
}  // namespace cortado
