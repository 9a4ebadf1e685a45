// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The one string that names a codec everywhere (attach, plans, cluster files, command line):
//
//   spec    := stage { "|" stage }
//   stage   := name [ "(" [ argument { "," argument } ] ")" ]
//   argument:= [ key "=" ] value          a value without a key goes to the codec's first parameter
//   value   := number | word | true | false | "[" [ word { "," word } ] "]"
//
// Parsing knows nothing of codecs; whether names and values are legal is asked of the registry (codec.h).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cortado/status.h"

namespace cortado {

struct SpecArgument {
  std::string key;    // empty when positional
  std::string value;  // the text as written, blanks trimmed; for a list its whole text with brackets
};

struct SpecStage {
  std::string name;
  std::vector<SpecArgument> arguments;
};

// The syntax tree of one string. Errors name the position, what was found and what was expected.
Result<std::vector<SpecStage>> parse_spec(std::string_view text);

// What one parameter of a codec or of the engine may be. Tables of these make the documentation, the error
// messages and `cortado codec list`.
enum class ParameterKind { kInteger, kReal, kBool, kChoice, kNames };

struct Parameter {
  const char* name;
  ParameterKind kind;
  const char* default_text;  // as a user would write it
  double min = 0;            // kInteger and kReal: smallest and largest legal value
  double max = 0;
  const char* choices = "";  // words separated by '|': all legal values of kChoice, extra ones ("auto") of the others
  const char* meaning = "";  // one line for the documentation
};

// Values of all parameters of one table, defaults filled in, in the order of the table.
class ParameterValues {
 public:
  // Reads `arguments` against `table`. `where` ("acp") begins each message:
  //   acp(rank=0): rank must be an integer from 1 to 4096, got "0"
  //   acp(rnak=4): no parameter "rnak"; acp takes rank, phase, ...
  static Result<ParameterValues> read(std::string_view where, const std::vector<SpecArgument>& arguments,
                                      const std::vector<Parameter>& table);

  std::int64_t integer(std::string_view name) const;
  double real(std::string_view name) const;
  bool boolean(std::string_view name) const;
  const std::string& word(std::string_view name) const;         // kChoice
  std::vector<std::string> names(std::string_view name) const;  // kNames
  const std::string& text(std::string_view name) const;
  bool was_given(std::string_view name) const;  // false when the default stands

 private:
  struct Entry {
    std::string name;
    std::string text;
    bool given = false;
  };
  const Entry& find(std::string_view name) const;
  std::vector<Entry> entries_;
};

}  // namespace cortado
