// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// JSON values as text, for files and errors. `Json` is one of nlohmann's types, which only *_json.cc know.
#pragma once

#include <cstddef>
#include <string>

#include "core/format.h"

namespace cortado {

// On one line. What is not UTF-8 becomes U+FFFD.
template <typename Json>
std::string json_line(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

template <typename Json>
std::string shortened_json(const Json& value) {
  constexpr std::size_t kLongest = 60;
  return shorten(json_line(value), kLongest);
}

}  // namespace cortado
