// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cortado {

// What stands for the specification in a state of auto: "auto, step 40: cast(bf16)", "auto, step 9, measuring, not
// topk(density=0.01): none". Behind "measuring" is what was on trial; states of earlier versions have no step.
struct SavedDecision {
  std::int64_t step = 0;
  bool decided = false;
  std::vector<std::string> refused;  // settings that lost too much
  std::string what;                  // runs, or was on trial: as AutoCandidate::what

  std::string text() const;
  static std::optional<SavedDecision> parse(std::string_view text);
};

}  // namespace cortado
