// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/fault_json.h"

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "core/format.h"
#include "core/json_text.h"

namespace cortado {

namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kMostLevels = 1000;     // some functions of the JSON library call themselves
constexpr std::size_t kMostFields = 1 << 14;  // of an object, which the library looks for one by one
constexpr std::size_t kLongest = 60;          // of what is quoted
constexpr std::size_t kLongestPlace = 200;

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
    if (!object.keys.insert(name).second) {
      fault_ = JsonFault{place(), "one of them", "a second one"};
    } else if (object.keys.size() > kMostFields) {
      object.key.reset();
      fault_ = JsonFault{place(), "at most " + std::to_string(kMostFields) + " fields", "more"};
    }
    return !fault_.has_value();
  }
  bool end_object() override { return close(); }
  bool start_array(std::size_t) override { return open(true); }
  bool end_array() override { return close(); }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    constexpr int kOutOfRange = 406;
    const std::size_t at = position - 1;
    const std::string byte = " (byte " + std::to_string(std::min(position, text_.size())) + ")";
    if (text_.empty()) {
      fault_ = JsonFault{"$", "JSON", "nothing: the text is empty"};
    } else if (at >= text_.size()) {
      fault_ = JsonFault{place(), "the rest", "the end of the text" + byte + ": it is cut short"};
    } else {
      const std::string word = shorten(word_at(text_, at), kLongest);
      const bool is_number = is_not_finite(word) || error.id == kOutOfRange;
      fault_ = is_number ? JsonFault{place(), "a finite number", word + byte}
                         : JsonFault{place(), "JSON", json_line(Json(word)) + byte};
    }
    return false;
  }
  const std::optional<JsonFault>& fault() const { return fault_; }
  std::string_view text() const { return text_; }

 private:
  struct Step {
    bool is_list;
    std::size_t index = 0;
    std::optional<std::string> key = {};  // whose value comes next
    std::set<std::string> keys = {};
  };

  std::string place() const {
    std::string text = "$";
    for (const Step& step : path_) {
      if (step.is_list) {
        text += "[" + std::to_string(step.index) + "]";
      } else if (step.key.has_value()) {
        text = field_of(text, *step.key);
      }
    }
    return shorten(text, kLongestPlace);
  }
  bool open(bool is_list) {
    if (path_.size() == kMostLevels) {
      fault_ = JsonFault{place(), "at most " + std::to_string(kMostLevels) + " levels", "more"};
      return false;
    }
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
      path_.back().key.reset();
    }
    return true;
  }

  std::string_view text_;
  std::vector<Step> path_;
  std::optional<JsonFault> fault_;
};

}  // namespace

std::string place_of(const std::string& list, std::size_t index) { return list + "[" + std::to_string(index) + "]"; }

Status status_of(const JsonFault& fault, StatusCode code) {
  return {code, fault.place + ": expected " + fault.expected + ", got " + fault.found};
}

std::string field_of(const std::string& object, std::string_view key) {
  const bool is_plain =
      std::all_of(key.begin(), key.end(), [](unsigned char c) { return std::isalnum(c) || c == '_'; });
  return is_plain && !key.empty() ? object + "." + std::string(key)
                                  : object + "[" + json_line(Json(shorten(key, kLongest))) + "]";
}

std::optional<JsonFault> find_json_fault(std::string_view text) {
  FaultFinder finder(text.substr(0, text.find('\0')));  // which the library takes for the end
  (void)Json::sax_parse(finder.text(), &finder);
  if (finder.fault().has_value() || finder.text().size() == text.size()) return finder.fault();
  return JsonFault{"$", "the end", "a byte 0 (byte " + std::to_string(finder.text().size() + 1) + ")"};
}

}  // namespace cortado
