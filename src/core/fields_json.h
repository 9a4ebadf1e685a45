// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// JSON files to plain values: one object, whose fields are asked for by name. For *_json.cc, which alone know
// nlohmann's types.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/fault_json.h"
#include "cortado/files.h"
#include "cortado/status.h"
#include "cortado/unknown_fields.h"

namespace cortado {

class JsonFields {
 public:
  using Json = nlohmann::ordered_json;

  // `path` is its place in the file. The first thing that is wrong goes to `fault`; from then on readers return
  // defaults. Both `object` and `fault` must outlive it.
  JsonFields(const Json& object, std::string path, std::optional<JsonFault>* fault);

  // Those without a value for what is missing need the field to be there.
  std::string text(const char* key);
  std::string text_or(const char* key, const std::string& missing);
  // One of the names that `name_of` gives the values of an enum, from its first to `last`.
  template <typename Enum>
  Enum word(const char* key, Enum last, std::string_view (*name_of)(Enum), std::optional<Enum> missing = {}) {
    const std::vector<std::string_view> names = names_of(last, name_of);
    const Json* value = find(key, one_of(names), !missing.has_value());
    if (value == nullptr) return missing.value_or(Enum{});
    return static_cast<Enum>(index_in(names, *value, place(key)));
  }
  bool boolean_or(const char* key, bool missing);
  double number_or(const char* key, double missing);
  std::optional<double> number_or_null(const char* key);
  std::int64_t integer(const char* key, const char* expected);
  std::int64_t integer_within(const char* key, std::int64_t least, std::int64_t most,
                              std::optional<std::int64_t> missing = {});
  // How many `things` there are. That it is below 1, say, whoever checks the result finds.
  int number_of(const char* key, const char* things, std::optional<int> missing = {});
  std::optional<std::int64_t> time_or_null(const char* key);
  // Lists. `expected` is one of its items.
  std::vector<std::int64_t> integers(const char* key, const char* expected);
  std::vector<std::string> texts(const char* key, bool required);
  template <typename Enum>
  std::vector<Enum> words(const char* key, Enum last, std::string_view (*name_of)(Enum)) {
    const std::vector<std::string_view> names = names_of(last, name_of);
    std::vector<Enum> result;
    for (const Json& item : list(key, "a list of texts", true)) {
      result.push_back(static_cast<Enum>(index_in(names, item, place_of(place(key), result.size()))));
    }
    return result;
  }
  // Of what is wrong, or not there and not required, an empty one.
  const Json& list(const char* key, const std::string& expected, bool required);

  // Calls `read` with each object of a list, while nothing is wrong. The list is of `things`.
  template <typename Read>
  void each(const char* key, const char* things, bool required, Read read) {
    const Json& objects = list(key, std::string("a list of ") + things, required);
    for (std::size_t i = 0; i < objects.size() && ok(); ++i) {
      read(JsonFields(objects[i], place_of(place(key), i), fault_));
    }
  }
  // Calls `read` with an object, if it is there; its unknown fields become this object's.
  template <typename Read>
  void inner(const char* key, Read read) {
    const Json* value = find(key, "an object", false);
    if (value == nullptr) return;
    JsonFields fields(*value, place(key), fault_);
    read(fields);
    keep_unknown(std::string("/") + key, fields);
  }
  // Calls `read` with key, value and place of each entry of an object, while nothing is wrong.
  template <typename Read>
  void each_entry(const char* key, bool required, Read read) {
    const Json* value = find(key, "an object", required);
    if (value == nullptr) return;
    if (!value->is_object()) return fail(key, "an object", shortened(*value));
    for (const auto& [name, entry] : value->items()) {
      if (ok()) read(name, entry, field_of(place(key), name));
    }
  }

  bool has(const char* key) const { return object_.contains(key); }
  bool ok() const { return !fault_->has_value(); }
  std::string place(std::string_view key) const { return field_of(path_, key); }
  double as_number(const Json& value, const std::string& where);
  void fail(const char* key, const std::string& expected, const std::string& found) {
    fail_at(place(key), expected, found);
  }
  void fail_at(const std::string& where, const std::string& expected, const std::string& found);
  std::optional<JsonFault>* fault() const { return fault_; }

  // The unknown fields of an object within this one, which is at the JSON pointer `where`.
  void keep_unknown(const std::string& where, const JsonFields& inner);
  // What nobody has asked for.
  UnknownFields unknown() const;

 private:
  template <typename Enum>
  static std::vector<std::string_view> names_of(Enum last, std::string_view (*name_of)(Enum)) {
    std::vector<std::string_view> names;
    for (int value = 0; value <= static_cast<int>(last); ++value) names.push_back(name_of(static_cast<Enum>(value)));
    return names;
  }
  static std::string one_of(const std::vector<std::string_view>& names);
  std::size_t index_in(const std::vector<std::string_view>& names, const Json& value, const std::string& where);
  const Json* find(const char* key, const std::string& expected, bool required);
  std::int64_t as_integer(const Json& value, const std::string& where, const char* expected);
  static std::string shortened(const Json& value);

  const Json& object_;
  std::string path_;
  std::optional<JsonFault>* fault_;
  std::set<std::string> known_;
  UnknownFields nested_;
};

// Calls `read` with the top object of a file of `format`, such as "cortado.job/1". `code`: of the error where the text
// is something else or has a fault; another version is kUnsupported. What `read` returns counts where it found none.
Status read_json(std::string_view json, const std::string& format, StatusCode code,
                 const std::function<Status(JsonFields& top)>& read);

// The file at `path`, as `parse` reads it; errors begin with the path.
template <typename Value>
Result<Value> load_json(const std::string& path, Result<Value> (*parse)(std::string_view)) {
  const Result<std::string> text = read_file(path);
  if (!text.ok()) return text.status().with_context(path);
  Result<Value> value = parse(text.value());
  if (!value.ok()) return value.status().with_context(path);
  return value;
}

// A file of ours: the top object on lines of its own, the items of its lists on one line each.
std::string json_by_lines(const JsonFields::Json& document);

}  // namespace cortado
