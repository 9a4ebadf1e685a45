// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/fault_json.h"

#include <gtest/gtest.h>

namespace cortado {
namespace {

std::string fault_of(std::string_view text) {
  const std::optional<JsonFault> fault = find_json_fault(text);
  return fault.has_value() ? fault->place + ": expected " + fault->expected + ", got " + fault->found : "";
}

TEST(JsonFault, NamesThePlace) {
  EXPECT_EQ(fault_of(R"({"a": [1, {"b": null, "c": "x"}], "d": -1.5e3})"), "");
  EXPECT_EQ(fault_of(R"({"a": [1, NaN]})"), "$.a[1]: expected a finite number, got NaN (byte 11)");
  EXPECT_EQ(fault_of(R"json({"a": {"b(c=1)": -Infinity}})json"),
            "$.a[\"b(c=1)\"]: expected a finite number, got -Infinity (byte 19)");
  EXPECT_EQ(fault_of(R"([0, nan])"), "$[1]: expected a finite number, got nan (byte 6)");
  EXPECT_EQ(fault_of(R"([0, 'x'])"), "$[1]: expected JSON, got \"'\" (byte 5)");
  EXPECT_EQ(fault_of(R"({"a": 1} b)"), "$: expected JSON, got \"b\" (byte 10)");
  EXPECT_EQ(fault_of(R"({"a": {"b": 1, "c": 2, "b": 3}})"), "$.a.b: expected one of them, got a second one");
  EXPECT_EQ(fault_of(R"([{"a": 1}, {"a": 1}])"), "");
  EXPECT_EQ(fault_of(R"({"a": {"": 1, "": 2}})"), "$.a[\"\"]: expected one of them, got a second one");
  EXPECT_EQ(fault_of(R"({"a\"b": [NaN]})"), "$[\"a\\\"b\"][0]: expected a finite number, got NaN (byte 11)");
  EXPECT_EQ(fault_of(R"({"a": 1e999})"), "$.a: expected a finite number, got 1e999 (byte 11)");
  EXPECT_EQ(fault_of("{\"a\": \"missing closing quote\x01\"}"), "$.a: expected JSON, got \"\\u0001\" (byte 29)");
  EXPECT_EQ(fault_of(std::string_view("{\"a\": 1}\0{", 10)), "$: expected the end, got a byte 0 (byte 9)");
  EXPECT_NE(fault_of(std::string(1000, '[')).find("...: expected the rest"), std::string::npos);
  EXPECT_NE(fault_of(std::string(1001, '[')).find("...: expected at most 1000 levels"), std::string::npos);
}

// Objects of the library are lists, and took a time that grew with the square of their fields.
TEST(JsonFault, LimitsTheFieldsOfAnObject) {
  std::string fields;
  for (int i = 0; i < 1 << 14; ++i) fields += (i == 0 ? "\"" : ",\"") + std::to_string(i) + "\":0";
  EXPECT_EQ(fault_of("{\"a\":[{" + fields + "}]}"), "");
  EXPECT_EQ(fault_of("{\"a\":[{" + fields + ",\"x\":0}]}"), "$.a[0]: expected at most 16384 fields, got more");
}

// However a text is cut, it is the end that is wrong.
TEST(JsonFault, TellsThatATextIsCutShort) {
  const std::string_view text = R"({"levels": [{"name": "intra", "ranks": 4}], "x": true})";
  EXPECT_EQ(fault_of(""), "$: expected JSON, got nothing: the text is empty");
  for (std::size_t length = 1; length < text.size(); ++length) {
    const std::string fault = fault_of(text.substr(0, length));
    EXPECT_NE(fault.find("expected the rest, got the end of the text"), std::string::npos) << length << ": " << fault;
  }
  EXPECT_EQ(fault_of(text.substr(0, 40)),
            "$.levels[0]: expected the rest, got the end of the text (byte 40): it is cut short");
}

}  // namespace
}  // namespace cortado
