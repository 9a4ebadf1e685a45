// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// How fast the machine is tells the time from the end of a step to the first gradients of the next one: optimizer,
// forward pass and the start of the backward pass, about the same whatever travels. The pace of some steps is that time
// of theirs over that of the dense steps: above 1 the machine was slower.
#pragma once

#include <cstdint>
#include <optional>

namespace cortado {

inline constexpr double kMostPace = 2;

// Nothing if a time is 0, which is not known, or they are so far apart that something else held one up.
inline std::optional<double> pace_of(std::int64_t first_ready_ns, std::int64_t dense_first_ready_ns) {
  if (first_ready_ns <= 0 || dense_first_ready_ns <= 0) return std::nullopt;
  const double pace = static_cast<double>(first_ready_ns) / static_cast<double>(dense_first_ready_ns);
  if (pace > kMostPace || pace < 1 / kMostPace) return std::nullopt;
  return pace;
}

}  // namespace cortado
