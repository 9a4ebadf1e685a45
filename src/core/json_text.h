// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// JSON values as text, for files and errors. `Json` is one of nlohmann's types, which only *_json.cc know, and
// fields_json.h for them.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "core/format.h"
#include "cortado/unknown_fields.h"

namespace cortado {

// On one line. What is not UTF-8 becomes U+FFFD.
template <typename Json>
std::string json_line(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// A key as part of a JSON pointer (RFC 6901).
inline std::string pointer_part(const std::string& key) {
  std::string text;
  for (const char c : key) text += c == '~' ? "~0" : c == '/' ? "~1" : std::string(1, c);
  return text;
}

// Whether it is one, of something within a document.
inline bool is_json_pointer(const std::string& text) {
  for (std::size_t i = text.find('~'); i != std::string::npos; i = text.find('~', i + 1)) {
    if (i + 1 == text.size() || (text[i + 1] != '0' && text[i + 1] != '1')) return false;
  }
  return !text.empty() && text[0] == '/';
}

// Fields back to where they were read. What belonged to something that is gone is left out; what is known by now wins.
template <typename Json>
void put_unknown(const UnknownFields& unknown, Json* object) {
  for (const auto& [text, json] : unknown) {
    Json value = Json::parse(json, nullptr, /*allow_exceptions=*/false);
    if (!is_json_pointer(text)) continue;
    const typename Json::json_pointer pointer(text);
    const typename Json::json_pointer owner = pointer.parent_pointer();
    if (value.is_discarded() || !object->contains(owner) || !object->at(owner).is_object()) continue;
    if (!object->contains(pointer)) (*object)[pointer] = std::move(value);
  }
}

template <typename Json>
std::string shortened_json(const Json& value) {
  constexpr std::size_t kLongest = 60;
  return shorten(json_line(value), kLongest);
}

}  // namespace cortado
