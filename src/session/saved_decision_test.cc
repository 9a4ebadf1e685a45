// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "session/saved_decision.h"

#include <gtest/gtest.h>

namespace cortado {
namespace {

TEST(SavedDecision, IsReadAsItWasWritten) {
  for (const SavedDecision& saved : {SavedDecision{.step = 40, .decided = true, .refused = {}, .what = "cast(bf16)"},
                                     SavedDecision{.step = 9,
                                     .decided = false,
                                     .refused = {"topk(density=0.01)", "plan"},
                                     .what = R"({"format": "cortado.plan/1"})"}}) {
    const std::optional<SavedDecision> read = SavedDecision::parse(saved.text());
    ASSERT_TRUE(read.has_value()) << saved.text();
    EXPECT_EQ(read->step, saved.step);
    EXPECT_EQ(read->decided, saved.decided);
    EXPECT_EQ(read->refused, saved.refused);
    EXPECT_EQ(read->what, saved.what);
  }
}

TEST(SavedDecision, OfEarlierVersionsHasNoStep) {
  const std::optional<SavedDecision> read = SavedDecision::parse("auto, measuring, not sign: none");
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->step, 0);
  EXPECT_FALSE(read->decided);
  EXPECT_EQ(read->refused, std::vector<std::string>{"sign"});
  EXPECT_EQ(read->what, "none");
}

TEST(SavedDecision, NothingElseIsRead) {
  for (const char* text : {"", "none", "auto", "auto topk: none", "automatic: none", "auto, step: none",
                           "auto, step x: none", "auto, step -3: none", "auto, step 3x: none", "auto, measured: none",
                           "auto, step 3, measuring not sign: none"}) {
    EXPECT_FALSE(SavedDecision::parse(text).has_value()) << text;
  }
}

}  // namespace
}  // namespace cortado
