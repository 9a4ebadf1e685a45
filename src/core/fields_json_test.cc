// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/fields_json.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace cortado {
namespace {

enum class Colour { kRed, kGreen, kBlue };
std::string_view colour_name(Colour colour) {
  constexpr std::string_view kNames[] = {"red", "green", "blue"};
  return kNames[static_cast<int>(colour)];
}

// Reads a file of cortado.test/1 with those fields.
Status read(const std::string& fields, const std::function<void(JsonFields&)>& read_fields) {
  return read_json(R"({"format": "cortado.test/1")" + (fields.empty() ? "" : ", " + fields) + "}", "cortado.test/1",
                   StatusCode::kCorruptData, [&](JsonFields& top) {
                     read_fields(top);
                     return Status();
                   });
}

TEST(JsonFields, ReadsWhatIsThere) {
  const Status status = read(
      R"("text": "a", "least": -9223372036854775808, "most": 9223372036854775807, "threads": 2147483647, "share": 1,
         "none": null, "list": [1, 2], "colour": "blue", "colours": ["green", "red"], "inner": {"flag": true, "~/": 7},
         "items": [{"name": "x"}, {"name": "y"}], "entries": {"k/l": 0.5}, "extra": {"kept": [1]})",
      [](JsonFields& top) {
        EXPECT_EQ(top.text("text"), "a");
        EXPECT_EQ(top.text_or("absent", "b"), "b");
        EXPECT_EQ(top.integer("least", "a number"), INT64_MIN);
        EXPECT_EQ(top.integer("most", "a number"), INT64_MAX);
        EXPECT_EQ(top.number_of("threads", "threads"), INT32_MAX);
        EXPECT_EQ(top.number_of("absent", "threads", 3), 3);
        EXPECT_EQ(top.number_or("share", 0), 1.0);
        EXPECT_EQ(top.number_or("absent", 0.25), 0.25);
        EXPECT_EQ(top.number_or_null("none"), std::nullopt);
        EXPECT_EQ(top.time_or_null("none"), std::nullopt);
        EXPECT_EQ(top.integers("list", "a size"), (std::vector<std::int64_t>{1, 2}));
        EXPECT_EQ(top.word("colour", Colour::kBlue, colour_name), Colour::kBlue);
        EXPECT_EQ(top.word("absent", Colour::kBlue, colour_name, std::optional(Colour::kGreen)), Colour::kGreen);
        EXPECT_EQ(top.words("colours", Colour::kBlue, colour_name),
                  (std::vector<Colour>{Colour::kGreen, Colour::kRed}));
        bool flag = false;
        top.inner("inner", [&](JsonFields& inner) { flag = inner.boolean_or("flag", false); });
        EXPECT_TRUE(flag);
        top.inner("absent", [](JsonFields&) { ADD_FAILURE(); });
        std::string names;
        top.each("items", "items", true, [&](JsonFields item) { names += item.text("name"); });
        EXPECT_EQ(names, "xy");
        top.each_entry("entries", true, [&](const std::string& key, const auto& value, const std::string& place) {
          EXPECT_EQ(key, "k/l");
          EXPECT_EQ(place, "$.entries[\"k/l\"]");
          EXPECT_EQ(top.as_number(value, place), 0.5);
        });
        EXPECT_EQ(top.unknown(), (UnknownFields{{"/extra", R"({"kept":[1]})"}, {"/inner/~0~1", "7"}}));
      });
  EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST(JsonFields, SaysWhatIsWrongAndWhere) {
  struct Case {
    std::string fields;
    std::function<void(JsonFields&)> read_fields;
    std::string message;
  };
  const auto colour = [](JsonFields& top) { (void)top.word("c", Colour::kBlue, colour_name); };
  const auto number = [](JsonFields& top) { (void)top.integer("n", "a size"); };
  const auto threads = [](JsonFields& top) { (void)top.number_of("n", "threads"); };
  const std::vector<Case> cases = {
      {"", colour, "$.c: expected \"red\", \"green\" or \"blue\", got nothing"},
      {R"("c": "pink")", colour, "$.c: expected \"red\", \"green\" or \"blue\", got \"pink\""},
      {R"("c": null)", colour, "$.c: expected \"red\", \"green\" or \"blue\", got null"},
      {R"("c": "a\nb\u001b")", colour, R"($.c: expected "red", "green" or "blue", got "a\nb\u001b")"},
      {R"("c": ")" + std::string(100, 'x') + "\"", colour,
       "$.c: expected \"red\", \"green\" or \"blue\", got \"" + std::string(59, 'x') + "..."},
      {R"("c": ["red", "pink"])", [](JsonFields& top) { (void)top.words("c", Colour::kBlue, colour_name); },
       "$.c[1]: expected \"red\", \"green\" or \"blue\", got \"pink\""},
      {R"("n": 1.5)", number, "$.n: expected a size, an integer, got 1.5"},
      {R"("n": 9223372036854775808)", number, "$.n: expected a size, below 2^63, got 9223372036854775808"},
      {R"("n": 2147483648)", threads, "$.n: expected a number of threads, below 2^31, got 2147483648"},
      {R"("n": -3000000000)", threads, "$.n: expected a number of threads, at least 0, got -3000000000"},
      {R"("n": 9)", [](JsonFields& top) { (void)top.integer_within("n", 0, 8); },
       "$.n: expected an integer from 0 to 8, got 9"},
      {R"("n": [1, true])", [](JsonFields& top) { (void)top.integers("n", "a size"); },
       "$.n[1]: expected a size, an integer, got true"},
      {R"("n": {})", [](JsonFields& top) { (void)top.integers("n", "a size"); },
       "$.n: expected a list of integers, got {}"},
      {R"("n": [{}, 7])", [](JsonFields& top) { top.each("n", "items", true, [](const JsonFields&) {}); },
       "$.n[1]: expected an object, got 7"},
      {R"("n": 7)", [](JsonFields& top) { top.each("n", "items", true, [](const JsonFields&) {}); },
       "$.n: expected a list of items, got 7"},
      {R"("n": [])", [](JsonFields& top) { top.inner("n", [](const JsonFields&) {}); },
       "$.n: expected an object, got []"},
      {R"("n": "1")", [](JsonFields& top) { (void)top.number_or("n", 0); }, "$.n: expected a number, got \"1\""},
      {R"("n": 1)", [](JsonFields& top) { (void)top.boolean_or("n", true); }, "$.n: expected true or false, got 1"},
  };
  for (const Case& wrong : cases) {
    const Status status = read(wrong.fields, wrong.read_fields);
    EXPECT_EQ(status.code(), StatusCode::kCorruptData) << wrong.fields;
    EXPECT_EQ(status.message(), wrong.message);
  }
}

TEST(JsonFields, TellsOfTheFirstFaultAndReadsDefaultsFromThenOn) {
  const Status status = read(R"("a": 1, "b": 2)", [](JsonFields& top) {
    EXPECT_EQ(top.text("a"), "");
    EXPECT_FALSE(top.ok());
    EXPECT_EQ(top.integer("b", "a number"), 0);
    EXPECT_EQ(top.text("absent"), "");
  });
  EXPECT_EQ(status.message(), "$.a: expected a text, got 1");
}

TEST(JsonFields, OtherFormatsAndVersionsAreRefused) {
  const auto status_of_text = [](std::string_view text) {
    return read_json(text, "cortado.test/1", StatusCode::kInvalidArgument, [](JsonFields&) {
      ADD_FAILURE() << "read";
      return Status();
    });
  };
  EXPECT_EQ(status_of_text("{").code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status_of_text("7").message(), "$: expected an object, got 7");
  EXPECT_EQ(status_of_text("{}").message(), "$.format: expected \"cortado.test/1\", got nothing");
  EXPECT_EQ(status_of_text(R"({"format": 1})").message(), "$.format: expected a text, got 1");
  const Status other = status_of_text(R"({"format": "cortado.text/1"})");
  EXPECT_EQ(other.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(other.message(), "$.format: expected \"cortado.test/1\", got \"cortado.text/1\"");
  EXPECT_EQ(status_of_text(R"({"format": "cortado.test/2"})").code(), StatusCode::kUnsupported);
}

}  // namespace
}  // namespace cortado
