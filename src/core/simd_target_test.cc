// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/simd_target.h"

#include <gtest/gtest.h>

namespace cortado {
namespace {

TEST(SimdTarget, AForcedTargetIsTheOneThatRuns) {
  const std::vector<std::int64_t> targets = simd_targets();
  ASSERT_FALSE(targets.empty());
  for (const std::int64_t target : targets) {
    const ForcedSimdTarget forced(target);
    EXPECT_EQ(simd_target(), target) << "forced " << simd_target_name(target) << ", ran "
                                     << simd_target_name(simd_target());
  }
}

TEST(SimdTarget, TheBestOneRunsOtherwise) {
  const std::vector<std::int64_t> targets = simd_targets();
  { const ForcedSimdTarget forced(targets.back()); }
  EXPECT_EQ(simd_targets(), targets);
  EXPECT_EQ(simd_target(), targets.front());
}

}  // namespace
}  // namespace cortado
