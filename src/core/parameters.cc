// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <charconv>
#include <cstdio>
#include <optional>

#include "core/check.h"
#include "core/format.h"
#include "cortado/spec.h"

namespace cortado {

namespace {

template <typename T>
std::optional<T> read_number(std::string_view text) {
  T value{};
  const char* const end = text.data() + text.size();
  const std::from_chars_result result = std::from_chars(text.data(), end, value);
  if (result.ec != std::errc() || result.ptr != end) return std::nullopt;
  return value;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const std::size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    text = end == std::string_view::npos ? "" : text.substr(end + 1);
  }
  return parts;
}

bool is_one_of(std::string_view word, std::string_view choices) {
  for (const std::string_view choice : split(choices, '|')) {
    if (choice == word) return true;
  }
  return false;
}

bool is_list(std::string_view text) { return text.size() >= 2 && text.front() == '[' && text.back() == ']'; }

bool is_legal(const Parameter& parameter, std::string_view text) {
  if (is_one_of(text, parameter.choices)) return true;
  switch (parameter.kind) {
    case ParameterKind::kInteger: {
      const auto value = read_number<std::int64_t>(text);
      return value && static_cast<double>(*value) >= parameter.min && static_cast<double>(*value) <= parameter.max;
    }
    case ParameterKind::kReal: {
      const auto value = read_number<double>(text);
      return value && *value >= parameter.min && *value <= parameter.max;  // false for NaN
    }
    case ParameterKind::kBool:
      return text == "true" || text == "false";
    case ParameterKind::kChoice:
      return false;
    case ParameterKind::kNames:
      return is_list(text);
  }
  return false;
}

// "bf16, fp16 or fp32"
std::string one_of(std::string_view choices) {
  const std::vector<std::string_view> words = split(choices, '|');
  std::string text;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (i > 0) text += i + 1 == words.size() ? " or " : ", ";
    text += words[i];
  }
  return text;
}

std::string range_of(const Parameter& parameter) {
  char text[80];
  std::snprintf(text, sizeof(text), "from %.16g to %.16g", parameter.min, parameter.max);
  return text;
}

std::string expected_of(const Parameter& parameter) {
  std::string text;
  switch (parameter.kind) {
    case ParameterKind::kInteger:
      text = "an integer " + range_of(parameter);
      break;
    case ParameterKind::kReal:
      text = "a number " + range_of(parameter);
      break;
    case ParameterKind::kBool:
      text = "true or false";
      break;
    case ParameterKind::kChoice:
      return one_of(parameter.choices);
    case ParameterKind::kNames:
      text = "a list of names such as [a, b]";
      break;
  }
  return *parameter.choices == '\0' ? text : text + ", or " + one_of(parameter.choices);
}

const Parameter* find_parameter(const std::vector<Parameter>& table, std::string_view name) {
  for (const Parameter& parameter : table) {
    if (name == parameter.name) return &parameter;
  }
  return nullptr;
}

constexpr std::size_t kLongestShown = 60;

// "acp(rank=0)"
std::string place_of(std::string_view where, const SpecArgument& argument) {
  const std::string key = argument.key.empty() ? "" : shorten(argument.key, kLongestShown) + "=";
  return std::string(where) + "(" + key + shorten(argument.value, kLongestShown) + ")";
}

Status unknown_parameter(std::string_view where, const SpecArgument& argument, const std::vector<Parameter>& table) {
  const std::string taker(where);
  const std::string place = place_of(where, argument);
  if (table.empty()) {
    return make_error(StatusCode::kInvalidArgument, "%s: %s takes no parameters", place.c_str(), taker.c_str());
  }
  std::string known;
  for (const Parameter& parameter : table) known += (known.empty() ? "" : ", ") + std::string(parameter.name);
  return make_error(StatusCode::kInvalidArgument, "%s: no parameter \"%s\"; %s takes %s", place.c_str(),
                    shorten(argument.key, kLongestShown).c_str(), taker.c_str(), known.c_str());
}

}  // namespace

Result<ParameterValues> ParameterValues::read(std::string_view where, const std::vector<SpecArgument>& arguments,
                                              const std::vector<Parameter>& table) {
  ParameterValues values;
  for (const Parameter& parameter : table) {
    CORTADO_CHECK(is_legal(parameter, parameter.default_text), "default of %s", parameter.name);
    values.entries_.push_back({parameter.name, parameter.default_text, false});
  }
  for (const SpecArgument& argument : arguments) {
    const Parameter* parameter = nullptr;
    if (!argument.key.empty()) parameter = find_parameter(table, argument.key);
    if (argument.key.empty() && !table.empty()) parameter = &table.front();
    if (parameter == nullptr) return unknown_parameter(where, argument, table);

    Entry& entry = values.entries_[static_cast<std::size_t>(parameter - table.data())];
    const std::string place = place_of(where, argument);
    if (entry.given) {
      return make_error(StatusCode::kInvalidArgument, "%s: %s was already given as \"%s\"%s", place.c_str(),
                        parameter->name, shorten(entry.text, kLongestShown).c_str(),
                        argument.key.empty() ? "; values of other parameters need their name in front" : "");
    }
    if (!is_legal(*parameter, argument.value)) {
      return make_error(StatusCode::kInvalidArgument, "%s: %s must be %s, got \"%s\"", place.c_str(), parameter->name,
                        expected_of(*parameter).c_str(), shorten(argument.value, kLongestShown).c_str());
    }
    entry.text = argument.value;
    entry.given = true;
  }
  return values;
}

const ParameterValues::Entry& ParameterValues::find(std::string_view name) const {
  for (const Entry& entry : entries_) {
    if (entry.name == name) return entry;
  }
  CORTADO_CHECK(false, "the table has no parameter \"%s\"", std::string(name).c_str());
}

std::int64_t ParameterValues::integer(std::string_view name) const {
  const auto value = read_number<std::int64_t>(find(name).text);
  CORTADO_CHECK(value.has_value(), "parameter \"%s\" is no integer", find(name).name.c_str());
  return *value;
}

double ParameterValues::real(std::string_view name) const {
  const auto value = read_number<double>(find(name).text);
  CORTADO_CHECK(value.has_value(), "parameter \"%s\" is no number", find(name).name.c_str());
  return *value;
}

bool ParameterValues::boolean(std::string_view name) const { return find(name).text == "true"; }
const std::string& ParameterValues::word(std::string_view name) const { return find(name).text; }
const std::string& ParameterValues::text(std::string_view name) const { return find(name).text; }
bool ParameterValues::was_given(std::string_view name) const { return find(name).given; }

std::vector<std::string> ParameterValues::names(std::string_view name) const {
  const std::string& text = find(name).text;
  CORTADO_CHECK(is_list(text), "parameter \"%s\" is no list", find(name).name.c_str());
  constexpr const char* kBlanks = " \t\r\n";
  std::vector<std::string> names;
  for (std::string_view word : split(std::string_view(text).substr(1, text.size() - 2), ',')) {
    const std::size_t begin = word.find_first_not_of(kBlanks);
    if (begin == std::string_view::npos) continue;  // "[ ]"
    names.emplace_back(word.substr(begin, word.find_last_not_of(kBlanks) - begin + 1));
  }
  return names;
}

}  // namespace cortado
