// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// JSON files to plain values: one object, whose fields are asked for by name. For *_json.cc, which alone know
// nlohmann's types.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/fault_json.h"
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
  bool boolean_or(const char* key, bool missing);
  double number_or(const char* key, double missing);
  std::optional<double> number_or_null(const char* key);
  std::int64_t integer(const char* key, const char* expected);
  std::int64_t integer_within(const char* key, std::int64_t least, std::int64_t most,
                              std::optional<std::int64_t> missing = {});
  // How many `things` there are. That it is below 1, say, whoever checks the result finds.
  int number_of(const char* key, const char* things, std::optional<int> missing = {});
  std::optional<std::int64_t> time_or_null(const char* key);
  std::vector<std::int64_t> integers(const char* key, const char* expected);
  std::vector<std::string> texts(const char* key, bool required);
  // A list; of what is wrong, or not there and not required, an empty one.
  const Json& list(const char* key, const char* expected, bool required);

  // Calls `read` with each object of a list, while nothing is wrong.
  template <typename Read>
  void each(const char* key, bool required, Read read) {
    const Json& objects = list(key, "a list", required);
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
  std::optional<JsonFault>* fault() { return fault_; }

  // The unknown fields of an object within this one, which is at the JSON pointer `where`.
  void keep_unknown(const std::string& where, const JsonFields& inner);
  // What nobody has asked for.
  UnknownFields unknown() const;

 private:
  const Json* find(const char* key, const std::string& expected, bool required);
  std::int64_t as_integer(const Json& value, const std::string& where, const char* expected);
  static std::string shortened(const Json& value);

  const Json& object_;
  std::string path_;
  std::optional<JsonFault>* fault_;
  std::set<std::string> known_;
  UnknownFields nested_;
};

// Of the document's top object: whether it says that it is of `format`, such as "cortado.job/1". `code`: of the error
// where it is something else; another version is unsupported.
Status check_json_format(JsonFields& top, const std::string& format, StatusCode code);

// A file of ours: the top object on lines of its own, the items of its lists on one line each.
std::string json_by_lines(const JsonFields::Json& document);

}  // namespace cortado
