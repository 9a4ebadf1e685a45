// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/fault_json.h"

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "core/format.h"

namespace cortado {

namespace {

using Json = nlohmann::ordered_json;

bool is_of_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '.' || c == '+' || c == '-'; }

// The word at `at`, or the character.
std::string_view word_at(std::string_view text, std::size_t at) {
  if (!is_of_word(text[at])) return text.substr(at, 1);
  std::size_t first = at, end = at;
  while (first > 0 && is_of_word(text[first - 1])) --first;
  while (end < text.size() && is_of_word(text[end])) ++end;
  return text.substr(first, end - first);
}

bool is_not_finite(std::string_view word) {
  std::string name(word.substr(word.starts_with('-') || word.starts_with('+') ? 1 : 0));
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
  return name == "nan" || name == "inf" || name == "infinity";
}

class FaultFinder : public nlohmann::json_sax<Json> {
 public:
  explicit FaultFinder(std::string_view text) : text_(text) {}

  bool null() override { return value(); }
  bool boolean(bool) override { return value(); }
  bool number_integer(number_integer_t) override { return value(); }
  bool number_unsigned(number_unsigned_t) override { return value(); }
  bool number_float(number_float_t, const string_t&) override { return value(); }
  bool string(string_t&) override { return value(); }
  bool binary(binary_t&) override { return value(); }
  bool start_object(std::size_t) override { return open(false); }
  bool key(string_t& name) override {
    Step& object = path_.back();
    object.key = name;
    if (object.keys.insert(name).second) return true;
    fault_ = JsonFault{place(), "it once", "it again"};
    return false;
  }
  bool end_object() override { return close(); }
  bool start_array(std::size_t) override { return open(true); }
  bool end_array() override { return close(); }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    const std::string_view why = error.what();
    const std::string byte = " (byte " + std::to_string(position) + ")";
    const bool has_ended =
        why.find("unexpected end of input") != why.npos || why.find("missing closing quote") != why.npos;
    if (text_.empty()) {
      fault_ = JsonFault{"$", "JSON", "nothing: the text is empty"};
    } else if (has_ended || position < 1 || position > text_.size()) {
      const std::string end = " (byte " + std::to_string(text_.size()) + ")";
      fault_ = JsonFault{place(), "the rest", "the end of the text" + end + ": it is cut short"};
    } else {
      constexpr std::size_t kLongest = 40;
      const std::string word = shorten(std::string(word_at(text_, position - 1)), kLongest);
      fault_ = is_not_finite(word) ? JsonFault{place(), "a finite number", word + byte}
                                   : JsonFault{place(), "JSON", "\"" + word + "\"" + byte};
    }
    return false;
  }
  const std::optional<JsonFault>& fault() const { return fault_; }

 private:
  struct Step {
    bool is_list;
    std::size_t index = 0;
    std::string key = {};
    std::set<std::string> keys = {};
  };

  std::string place() const {
    std::string text = "$";
    for (const Step& step : path_) {
      if (step.is_list) {
        text += "[" + std::to_string(step.index) + "]";
      } else if (!step.key.empty()) {
        text = field_of(text, step.key);
      }
    }
    return text;
  }
  bool open(bool is_list) {
    path_.push_back({is_list});
    return true;
  }
  bool close() {
    path_.pop_back();
    return value();
  }
  bool value() {
    if (!path_.empty()) {
      ++path_.back().index;
      path_.back().key.clear();
    }
    return true;
  }

  std::string_view text_;
  std::vector<Step> path_;
  std::optional<JsonFault> fault_;
};

}  // namespace

std::string field_of(const std::string& object, std::string_view key) {
  const bool is_plain =
      std::all_of(key.begin(), key.end(), [](unsigned char c) { return std::isalnum(c) || c == '_'; });
  return is_plain && !key.empty() ? object + "." + std::string(key) : object + "[\"" + std::string(key) + "\"]";
}

std::optional<JsonFault> find_json_fault(std::string_view text) {
  FaultFinder finder(text);
  (void)Json::sax_parse(text, &finder);
  return finder.fault();
}

}  // namespace cortado
