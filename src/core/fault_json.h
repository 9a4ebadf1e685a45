// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What is wrong with a text that shall be JSON, for errors that name the place.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "cortado/status.h"

namespace cortado {

// "$.levels" and "name" to "$.levels.name"; what is no identifier in brackets: $.errors["topk(density=0.01)"].
std::string field_of(const std::string& object, std::string_view key);
// "$.levels" and 1 to "$.levels[1]".
std::string place_of(const std::string& list, std::size_t index);

struct JsonFault {
  std::string place, expected, found;
};
// "$.tensors[3].ready_ns: expected ..., got ..."
Status status_of(const JsonFault& fault, StatusCode code);

// The first one: where the text stops being JSON (such as at the NaN that Python writes), or ends, or has a field
// twice, more than 1000 levels or an object of more than 16384 fields.
std::optional<JsonFault> find_json_fault(std::string_view text);

}  // namespace cortado
