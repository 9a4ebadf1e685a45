// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// JSON values as text, for files and errors. `Json` is nlohmann::json or ordered_json; only *_json.cc include those.
#ifndef CORTADO_CORE_JSON_TEXT_H_
#define CORTADO_CORE_JSON_TEXT_H_

#include <cstddef>
#include <string>

namespace cortado {

// On one line. What is not UTF-8 becomes U+FFFD.
template <typename Json>
std::string json_line(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// For an error: at most `longest` bytes, then with "..." at the end.
template <typename Json>
std::string shortened_json(const Json& value, std::size_t longest = 60) {
  std::string text = json_line(value);
  if (text.size() > longest) text = text.substr(0, longest - 3) + "...";
  return text;
}

}  // namespace cortado

#endif  // CORTADO_CORE_JSON_TEXT_H_
