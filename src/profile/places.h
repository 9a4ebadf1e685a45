// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Errors of profiles: the path of the place in the file, what was expected there and what was found.
#pragma once

#include <cstdint>
#include <string>

#include "cortado/status.h"

namespace cortado {

inline std::string place_of(const std::string& list, std::size_t index) {
  return list + "[" + std::to_string(index) + "]";
}

// "$.tensors[3].ready_ns: expected ..., got ..."
inline Status refuse(const std::string& place, const std::string& expected, const std::string& found) {
  return {StatusCode::kCorruptData, place + ": expected " + expected + ", got " + found};
}

inline Status check_range(const std::string& place, std::int64_t value, std::int64_t min, std::int64_t max,
                          const std::string& unit) {
  if (value >= min && value <= max) return {};
  return refuse(place, "from " + std::to_string(min) + " to " + std::to_string(max) + " " + unit,
                std::to_string(value));
}

}  // namespace cortado
