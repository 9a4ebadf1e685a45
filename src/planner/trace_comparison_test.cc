// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "cortado/planner.h"

namespace cortado {
namespace {

Timeline example() {
  return {.step_ns = 100,
          .rows = {"compute", "cpu codec", "inter"},
          .events = {{.start_ns = 0, .end_ns = 60, .name = "backward"},
                     {.start_ns = 10, .end_ns = 14, .row = 1, .bucket = 0, .name = "encode"},
                     {.start_ns = 30, .end_ns = 36, .row = 1, .bucket = 1, .name = "encode"},
                     {.start_ns = 14, .end_ns = 50, .row = 2, .bucket = 0, .name = "all_gather"},
                     {.start_ns = 50, .end_ns = 57, .row = 1, .bucket = 0, .name = "decode"},
                     {.start_ns = 60, .end_ns = 100, .name = "forward"}}};
}

TraceEvent event(Stage stage, std::int64_t step, std::int64_t start_ns, std::int64_t end_ns) {
  return {.stage = stage, .message = 0, .step = step, .start_ns = start_ns, .end_ns = end_ns};
}

// A trace has no computation: what is compared with it begins with the first encode or transfer and ends with the last.
TEST(CompareWithTrace, LeavesComputationOut) {
  Trace trace;
  trace.events = {event(Stage::kEncode, 7, 1000, 1006), event(Stage::kCommunicate, 7, 1006, 1040),
                  event(Stage::kDecode, 7, 1040, 1050), event(Stage::kEncode, 7, 1020, 1023)};
  const std::vector<PredictedTime> compared = compare_with_trace(example(), trace);
  ASSERT_EQ(compared.size(), 3u);
  EXPECT_EQ(compared[0], (PredictedTime{"exchange", 47, 50}));
  EXPECT_EQ(compared[1], (PredictedTime{"encode", 10, 9}));
  EXPECT_EQ(compared[2], (PredictedTime{"decode", 7, 10}));
}

// Engines of a plan record what goes into a bucket's buffer as encoded, and what comes out of it as decoded.
TEST(CompareWithTrace, PackingCountsAsInTraces) {
  Timeline timeline = example();
  timeline.events.push_back({.start_ns = 8, .end_ns = 10, .row = 1, .bucket = 0, .name = "pack"});
  timeline.events.push_back({.start_ns = 57, .end_ns = 60, .row = 1, .bucket = 0, .name = "unpack"});
  Trace trace;
  trace.events = {event(Stage::kEncode, 7, 1000, 1006)};
  const std::vector<PredictedTime> compared = compare_with_trace(timeline, trace);
  ASSERT_EQ(compared.size(), 3u);
  EXPECT_EQ(compared[0].predicted_ns, 52);
  EXPECT_EQ(compared[1].predicted_ns, 12);
  EXPECT_EQ(compared[2].predicted_ns, 10);
}

TEST(CompareWithTrace, TakesTheMedianOfTheSteps) {
  Trace trace;
  for (const auto& [step, length_ns] : {std::pair(0, 900), std::pair(1, 50), std::pair(2, 40)}) {
    trace.events.push_back(event(Stage::kEncode, step, 1000 * step, 1000 * step + length_ns / 10));
    trace.events.push_back(event(Stage::kWait, step, 1000 * step, 1000 * step + length_ns));
  }
  const std::vector<PredictedTime> compared = compare_with_trace(example(), trace);
  ASSERT_EQ(compared.size(), 3u);
  EXPECT_EQ(compared[0].measured_ns, 50);
  EXPECT_EQ(compared[1].measured_ns, 5);
  EXPECT_EQ(compared[2].measured_ns, 0);
}

// Sums of many long events overflowed.
TEST(CompareWithTrace, TimesThatAddUpToTooMuchAreTheLongest) {
  Trace trace;
  for (int i = 0; i < 9; ++i) trace.events.push_back(event(Stage::kEncode, 7, 0, INT64_MAX / 4));
  EXPECT_EQ(compare_with_trace(example(), trace)[1].measured_ns, INT64_MAX);
}

TEST(CompareWithTrace, HasNothingToSayOfAnEmptyTrace) { EXPECT_TRUE(compare_with_trace(example(), {}).empty()); }

}  // namespace
}  // namespace cortado
