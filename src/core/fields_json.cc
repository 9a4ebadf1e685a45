// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/fields_json.h"

#include <algorithm>
#include <utility>

#include "core/json_text.h"

namespace cortado {

namespace {

using Json = nlohmann::ordered_json;

// What is beyond 2^63 is none.
std::optional<std::int64_t> integer_of(const Json& value) {
  if (!value.is_number_integer()) return std::nullopt;
  if (value.is_number_unsigned() && !std::in_range<std::int64_t>(value.get<std::uint64_t>())) return std::nullopt;
  return value.get<std::int64_t>();
}

}  // namespace

JsonFields::JsonFields(const Json& object, std::string path, std::optional<JsonFault>* fault)
    : object_(object), path_(std::move(path)), fault_(fault) {
  if (!object.is_object()) fail_at(path_, "an object", shortened(object));
}

std::string JsonFields::text(const char* key) {
  const Json* value = find(key, "a text", true);
  if (value == nullptr) return "";
  if (value->is_string()) return value->get<std::string>();
  return fail(key, "a text", shortened(*value)), "";
}

std::string JsonFields::text_or(const char* key, const std::string& missing) {
  return find(key, "a text", false) == nullptr ? missing : text(key);
}

bool JsonFields::boolean_or(const char* key, bool missing) {
  const Json* value = find(key, "true or false", false);
  if (value == nullptr) return missing;
  if (!value->is_boolean()) return fail(key, "true or false", shortened(*value)), missing;
  return value->get<bool>();
}

double JsonFields::number_or(const char* key, double missing) {
  const Json* value = find(key, "a number", false);
  return value == nullptr ? missing : as_number(*value, place(key));
}

std::optional<double> JsonFields::number_or_null(const char* key) {
  const Json* value = find(key, "a number or null", false);
  if (value == nullptr || value->is_null()) return std::nullopt;
  return as_number(*value, place(key));
}

std::int64_t JsonFields::integer(const char* key, const char* expected) {
  const Json* value = find(key, expected, true);
  return value == nullptr ? 0 : as_integer(*value, place(key), expected);
}

std::int64_t JsonFields::integer_within(const char* key, std::int64_t least, std::int64_t most,
                                        std::optional<std::int64_t> missing) {
  const std::string expected = "an integer from " + std::to_string(least) + " to " + std::to_string(most);
  const Json* value = find(key, expected, !missing.has_value());
  if (value == nullptr) return missing.value_or(least);
  const std::optional<std::int64_t> number = integer_of(*value);
  if (number.has_value() && *number >= least && *number <= most) return *number;
  return fail(key, expected, shortened(*value)), least;
}

int JsonFields::number_of(const char* key, const char* things, std::optional<int> missing) {
  const std::string expected = std::string("a number of ") + things;
  const Json* value = find(key, expected, !missing.has_value());
  if (value == nullptr) return missing.value_or(0);
  const std::int64_t number = as_integer(*value, place(key), expected.c_str());
  if (std::in_range<int>(number)) return static_cast<int>(number);
  return fail(key, expected + (number < 0 ? ", at least 0" : ", below 2^31"), std::to_string(number)), 0;
}

std::optional<std::int64_t> JsonFields::time_or_null(const char* key) {
  const Json* value = find(key, "nanoseconds or null", false);
  if (value == nullptr || value->is_null()) return std::nullopt;
  return as_integer(*value, place(key), "nanoseconds or null");
}

std::vector<std::int64_t> JsonFields::integers(const char* key, const char* expected) {
  std::vector<std::int64_t> result;
  for (const Json& item : list(key, "a list of integers", true)) {
    result.push_back(as_integer(item, place_of(place(key), result.size()), expected));
  }
  return result;
}

std::vector<std::string> JsonFields::texts(const char* key, bool required) {
  std::vector<std::string> result;
  for (const Json& item : list(key, "a list of texts", required)) {
    if (!item.is_string()) return fail_at(place_of(place(key), result.size()), "a text", shortened(item)), result;
    result.push_back(item.get<std::string>());
  }
  return result;
}

const Json& JsonFields::list(const char* key, const std::string& expected, bool required) {
  static const Json kEmpty = Json::array();
  const Json* value = find(key, expected, required);
  if (value == nullptr) return kEmpty;
  if (value->is_array()) return *value;
  return fail(key, expected, shortened(*value)), kEmpty;
}

double JsonFields::as_number(const Json& value, const std::string& where) {
  if (value.is_number()) return value.get<double>();
  return fail_at(where, "a number", shortened(value)), 0;
}

void JsonFields::fail_at(const std::string& where, const std::string& expected, const std::string& found) {
  if (ok()) *fault_ = JsonFault{where, expected, found};
}

void JsonFields::keep_unknown(const std::string& where, const JsonFields& inner) {
  for (const auto& [pointer, json] : inner.unknown()) nested_[where + pointer] = json;
}

UnknownFields JsonFields::unknown() const {
  UnknownFields fields = nested_;
  if (!object_.is_object()) return fields;
  for (const auto& [name, value] : object_.items()) {
    if (known_.count(name) == 0) fields["/" + pointer_part(name)] = json_line(value);
  }
  return fields;
}

std::string JsonFields::one_of(const std::vector<std::string_view>& names) {
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (i > 0) text += i + 1 < names.size() ? ", " : " or ";
    text += "\"" + std::string(names[i]) + "\"";
  }
  return text;
}

std::size_t JsonFields::index_in(const std::vector<std::string_view>& names, const Json& value,
                                 const std::string& where) {
  if (value.is_string()) {
    const auto found = std::find(names.begin(), names.end(), value.get_ref<const std::string&>());
    if (found != names.end()) return static_cast<std::size_t>(found - names.begin());
  }
  return fail_at(where, one_of(names), shortened(value)), 0;
}

const Json* JsonFields::find(const char* key, const std::string& expected, bool required) {
  known_.insert(key);
  if (!ok()) return nullptr;
  const auto found = object_.find(key);
  if (found != object_.end()) return &*found;
  if (required) fail(key, expected, "nothing");
  return nullptr;
}

std::int64_t JsonFields::as_integer(const Json& value, const std::string& where, const char* expected) {
  const std::optional<std::int64_t> number = integer_of(value);
  if (number.has_value()) return *number;
  const char* const range = value.is_number_integer() ? ", below 2^63" : ", an integer";
  return fail_at(where, expected + std::string(range), shortened(value)), 0;
}

std::string JsonFields::shortened(const Json& value) { return shortened_json(value); }

Status read_json(std::string_view json, const std::string& format, StatusCode code,
                 const std::function<Status(JsonFields& top)>& read) {
  std::optional<JsonFault> fault = find_json_fault(json);
  if (fault.has_value()) return status_of(*fault, code);
  const Json document = Json::parse(json);
  JsonFields top(document, "$", &fault);
  const std::string expected = "\"" + format + "\"";
  if (top.ok() && !top.has("format")) top.fail("format", expected, "nothing");
  const std::string found = top.text("format");
  if (top.ok() && found != format) {
    const bool is_other_version = found.starts_with(format.substr(0, format.find('/') + 1));
    if (is_other_version) code = StatusCode::kUnsupported;
    top.fail("format", expected, shortened_json(Json(found)));
  }
  const Status status = top.ok() ? read(top) : Status();
  return fault.has_value() ? status_of(*fault, code) : status;
}

std::string json_by_lines(const Json& document) {
  std::string text = "{\n";
  bool first = true;
  for (const auto& [key, value] : document.items()) {
    text += (first ? "" : ",\n") + std::string(" ") + json_line(Json(key)) + ": ";
    first = false;
    if (!value.is_array() || value.empty()) {
      text += json_line(value);
      continue;
    }
    text += "[\n";
    for (std::size_t i = 0; i < value.size(); ++i) text += (i == 0 ? "  " : ",\n  ") + json_line(value[i]);
    text += "]";
  }
  return text + "\n}\n";
}

}  // namespace cortado
