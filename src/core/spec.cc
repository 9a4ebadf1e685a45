// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/spec.h"

#include "core/check.h"
#include "core/format.h"

namespace cortado {

namespace {

constexpr std::string_view kSpecial = ",()=|[]\"'";

bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }
bool is_control(char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }
bool is_word_char(char c) { return !is_blank(c) && !is_control(c) && kSpecial.find(c) == std::string_view::npos; }

// What a message shows of a text that may be long or unprintable.
std::string shown(std::string_view text) {
  constexpr std::size_t kLongest = 100;
  return printable(shorten(text, kLongest));
}

// One pass over the text, no recursion, so that hostile text can neither exhaust the stack nor take long.
class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Result<std::vector<SpecStage>> parse() {
    std::vector<SpecStage> stages;
    do {
      CORTADO_ASSIGN_OR_RETURN(SpecStage stage, parse_stage());
      stages.push_back(std::move(stage));
    } while (take('|'));
    if (at_ < text_.size()) {
      return unexpected(stages.back().arguments.empty() ? "\"(\", \"|\" or the end" : "\"|\" or the end");
    }
    return stages;
  }

 private:
  Result<SpecStage> parse_stage() {
    SpecStage stage;
    CORTADO_ASSIGN_OR_RETURN(stage.name, take_word("a codec name"));
    if (!take('(') || take(')')) return stage;
    do {
      CORTADO_ASSIGN_OR_RETURN(SpecArgument argument, parse_argument());
      stage.arguments.push_back(std::move(argument));
    } while (take(','));
    if (!take(')')) return unexpected("\",\" or \")\"");
    return stage;
  }

  Result<SpecArgument> parse_argument() {
    SpecArgument argument;
    if (next_is('[')) {
      CORTADO_ASSIGN_OR_RETURN(argument.value, take_list());
      return argument;
    }
    CORTADO_ASSIGN_OR_RETURN(argument.value, take_word("a parameter or a value"));
    if (!take('=')) return argument;
    argument.key = std::move(argument.value);
    if (next_is('[')) {
      CORTADO_ASSIGN_OR_RETURN(argument.value, take_list());
    } else {
      CORTADO_ASSIGN_OR_RETURN(argument.value, take_word("a value"));
    }
    return argument;
  }

  Result<std::string> take_list() {
    take('[');
    const std::size_t begin = at_ - 1;
    if (!take(']')) {
      do {
        CORTADO_RETURN_IF_ERROR(take_word("a name").status());
      } while (take(','));
      if (!take(']')) return unexpected("\",\" or \"]\"");
    }
    return std::string(text_.substr(begin, at_ - begin));
  }

  Result<std::string> take_word(const char* expected) {
    skip_blanks();
    const std::size_t begin = at_;
    while (at_ < text_.size() && is_word_char(text_[at_])) ++at_;
    if (at_ == begin) return unexpected(expected);
    return std::string(text_.substr(begin, at_ - begin));
  }

  bool next_is(char c) {
    skip_blanks();
    return at_ < text_.size() && text_[at_] == c;
  }

  bool take(char c) {
    if (!next_is(c)) return false;
    ++at_;
    return true;
  }

  void skip_blanks() {
    while (at_ < text_.size() && is_blank(text_[at_])) ++at_;
  }

  Status unexpected(const char* expected) const {
    const std::string found = at_ < text_.size() ? "\"" + shown(text_.substr(at_, 1)) + "\"" : "the end";
    return make_error(StatusCode::kInvalidArgument, "\"%s\": position %zu: expected %s, got %s", shown(text_).c_str(),
                      at_ + 1, expected, found.c_str());
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace

Result<std::vector<SpecStage>> parse_spec(std::string_view text) { return Parser(text).parse(); }

}  // namespace cortado
