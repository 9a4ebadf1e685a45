// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/spec.h"

#include <gtest/gtest.h>

#include <string>

namespace cortado {
namespace {

std::string shape_of(std::string_view text) {
  const Result<std::vector<SpecStage>> stages = parse_spec(text);
  if (!stages.ok()) return stages.status().message();
  std::string shape;
  for (const SpecStage& stage : stages.value()) {
    shape += "<" + stage.name;
    for (const SpecArgument& argument : stage.arguments) shape += " " + argument.key + ":" + argument.value;
    shape += ">";
  }
  return shape;
}

TEST(ParseSpec, ReadsTheWholeGrammar) {
  EXPECT_EQ(shape_of("none"), "<none>");
  EXPECT_EQ(shape_of("none()"), "<none>");
  EXPECT_EQ(shape_of("cast(bf16)"), "<cast :bf16>");
  EXPECT_EQ(shape_of(" acp ( rank = 4 ,phase=global ) "), "<acp rank:4 phase:global>");
  EXPECT_EQ(shape_of("topk(density=0.01) | quant(bits=4)|rans"), "<topk density:0.01><quant bits:4><rans>");
  EXPECT_EQ(shape_of("acp(dense=[head.weight, emb*], error=-1e-3)"), "<acp dense:[head.weight, emb*] error:-1e-3>");
  EXPECT_EQ(shape_of("acp(dense=[])"), "<acp dense:[]>");
  EXPECT_EQ(shape_of("acp([ a ])"), "<acp :[ a ]>");
}

TEST(ParseSpec, ErrorsNamePositionAndWhatWasExpected) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "\"\": position 1: expected a codec name, got the end"},
      {"  ", "\"  \": position 3: expected a codec name, got the end"},
      {"(4)", "\"(4)\": position 1: expected a codec name, got \"(\""},
      {"acp(rank=4", "\"acp(rank=4\": position 11: expected \",\" or \")\", got the end"},
      {"acp(rank=4))", "\"acp(rank=4))\": position 12: expected \"|\" or the end, got \")\""},
      {"acp rank", "\"acp rank\": position 5: expected \"(\", \"|\" or the end, got \"r\""},
      {"acp(rank=)", "\"acp(rank=)\": position 10: expected a value, got \")\""},
      {"acp(rank=4 5)", "\"acp(rank=4 5)\": position 12: expected \",\" or \")\", got \"5\""},
      {"acp(,)", "\"acp(,)\": position 5: expected a parameter or a value, got \",\""},
      {"acp(a=1,)", "\"acp(a=1,)\": position 9: expected a parameter or a value, got \")\""},
      {"acp(dense=[a", "\"acp(dense=[a\": position 13: expected \",\" or \"]\", got the end"},
      {"acp(dense=[a,])", "\"acp(dense=[a,])\": position 14: expected a name, got \"]\""},
      {"acp(dense=[[a]])", "\"acp(dense=[[a]])\": position 12: expected a name, got \"[\""},
      {"a|", "\"a|\": position 3: expected a codec name, got the end"},
      {"a||b", "\"a||b\": position 3: expected a codec name, got \"|\""},
      {"acp(rank='4')", "\"acp(rank='4')\": position 10: expected a value, got \"'\""},
      {std::string("ac\0p", 4), "\"ac?p\": position 3: expected \"(\", \"|\" or the end, got \"?\""},
  };
  for (const auto& [text, message] : cases) EXPECT_EQ(shape_of(text), message);
}

TEST(ParseSpec, HostileTextEndsSoon) {
  EXPECT_FALSE(parse_spec(std::string(1 << 20, '(')).ok());
  EXPECT_FALSE(parse_spec(std::string("a(").append(1 << 20, '[')).ok());
  const Status status = parse_spec(std::string(1 << 20, 'a').append("(")).status();
  EXPECT_LT(status.message().size(), 250u);
}

const std::vector<Parameter> kTable = {
    {.name = "rank", .kind = ParameterKind::kInteger, .default_text = "4", .min = 1, .max = 4096},
    {.name = "rate", .kind = ParameterKind::kReal, .default_text = "auto", .min = 0.001, .max = 1e6, .choices = "auto"},
    {.name = "exact", .kind = ParameterKind::kBool, .default_text = "false"},
    {.name = "phase", .kind = ParameterKind::kChoice, .default_text = "balanced", .choices = "balanced|global|off"},
    {.name = "dense", .kind = ParameterKind::kNames, .default_text = "[]"},
};

Result<ParameterValues> read(std::string_view text) {
  const std::vector<SpecStage> stages = parse_spec(text).value();
  return ParameterValues::read(stages[0].name, stages[0].arguments, kTable);
}

TEST(ParameterValues, FillsInDefaults) {
  const ParameterValues values = read("acp").value();
  EXPECT_EQ(values.integer("rank"), 4);
  EXPECT_EQ(values.text("rate"), "auto");
  EXPECT_FALSE(values.boolean("exact"));
  EXPECT_EQ(values.word("phase"), "balanced");
  EXPECT_TRUE(values.names("dense").empty());
  EXPECT_FALSE(values.was_given("rank"));
}

TEST(ParameterValues, ReadsWhatIsGiven) {
  const ParameterValues values = read("acp(rate=0.5, 4096, exact=true, phase=off, dense=[ a.b ,c*])").value();
  EXPECT_EQ(values.integer("rank"), 4096);
  EXPECT_EQ(values.real("rate"), 0.5);
  EXPECT_TRUE(values.boolean("exact"));
  EXPECT_EQ(values.word("phase"), "off");
  EXPECT_EQ(values.names("dense"), (std::vector<std::string>{"a.b", "c*"}));
  EXPECT_TRUE(values.was_given("rank"));
  EXPECT_EQ(read("acp(1)").value().integer("rank"), 1);
}

TEST(ParameterValues, ErrorsNameParameterValueAndExpectation) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"acp(rank=0)", "acp(rank=0): rank must be an integer from 1 to 4096, got \"0\""},
      {"acp(rank=4097)", "acp(rank=4097): rank must be an integer from 1 to 4096, got \"4097\""},
      {"acp(0x4)", "acp(0x4): rank must be an integer from 1 to 4096, got \"0x4\""},
      {"acp(rank=4.0)", "acp(rank=4.0): rank must be an integer from 1 to 4096, got \"4.0\""},
      {"acp(rank=99999999999999999999)",
       "acp(rank=99999999999999999999): rank must be an integer from 1 to 4096, got \"99999999999999999999\""},
      {"acp(rank=[4])", "acp(rank=[4]): rank must be an integer from 1 to 4096, got \"[4]\""},
      {"acp(rate=nan)", "acp(rate=nan): rate must be a number from 0.001 to 1000000, or auto, got \"nan\""},
      {"acp(rate=inf)", "acp(rate=inf): rate must be a number from 0.001 to 1000000, or auto, got \"inf\""},
      {"acp(exact=yes)", "acp(exact=yes): exact must be true or false, got \"yes\""},
      {"acp(phase=local)", "acp(phase=local): phase must be balanced, global or off, got \"local\""},
      {"acp(dense=a)", "acp(dense=a): dense must be a list of names such as [a, b], got \"a\""},
      {"acp(rnak=4)", "acp(rnak=4): no parameter \"rnak\"; acp takes rank, rate, exact, phase, dense"},
      {"acp(rank=1, rank=2)", "acp(rank=2): rank was already given as \"1\""},
      {"acp(1, 2)", "acp(2): rank was already given as \"1\"; values of other parameters need their name in front"},
  };
  for (const auto& [text, message] : cases) {
    const Result<ParameterValues> values = read(text);
    ASSERT_FALSE(values.ok()) << text;
    EXPECT_EQ(values.status().message(), message);
    EXPECT_EQ(values.status().code(), StatusCode::kInvalidArgument);
  }
}

TEST(ParameterValues, ATableMayBeEmpty) {
  EXPECT_TRUE(ParameterValues::read("none", {}, {}).ok());
  EXPECT_EQ(ParameterValues::read("none", {{"", "4"}}, {}).status().message(), "none(4): none takes no parameters");
}

TEST(ParameterValuesDeathTest, AskingForAnUnknownNameIsABug) {
  const ParameterValues values = read("acp").value();
  EXPECT_DEATH((void)values.integer("rnak"), "no parameter \"rnak\"");
  EXPECT_DEATH((void)values.real("rate"), "\"rate\" is no number");
}

}  // namespace
}  // namespace cortado
