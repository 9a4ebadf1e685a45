// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace cortado {

// Options count in seconds, communicators and clocks in nanoseconds. At most 292 years.
inline std::chrono::nanoseconds from_seconds(double seconds) {
  return std::chrono::nanoseconds(static_cast<std::int64_t>(std::min(seconds * 1e9, 9.2e18)));
}

}  // namespace cortado
