// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace cortado {

// Options count in seconds, communicators and clocks in nanoseconds. At most 292 years, in either direction; NaN is the
// most.
inline std::chrono::nanoseconds from_seconds(double seconds) {
  constexpr double kMost = 9.2e9;
  const double within = seconds < kMost ? std::max(seconds, -kMost) : kMost;
  return std::chrono::nanoseconds(static_cast<std::int64_t>(within * 1e9));
}

}  // namespace cortado
