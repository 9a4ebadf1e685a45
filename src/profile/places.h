// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Errors of profiles: the path of the place in the file, what was expected there and what was found.
#pragma once

#include <cstdint>
#include <string>

#include "core/fault_json.h"
#include "cortado/status.h"

namespace cortado {

inline Status refuse(const std::string& place, const std::string& expected, const std::string& found) {
  return status_of({place, expected, found}, StatusCode::kCorruptData);
}

inline Status check_range(const std::string& place, std::int64_t value, std::int64_t min, std::int64_t max,
                          const std::string& unit) {
  if (value >= min && value <= max) return {};
  return refuse(place, "from " + std::to_string(min) + " to " + std::to_string(max) + " " + unit,
                std::to_string(value));
}

}  // namespace cortado
