// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/plan.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "core/temporary_directory_testing.h"

namespace cortado {
namespace {

constexpr const char* kText = R"json({"format": "cortado.plan/1", "job": "gpt2", "cluster": "two racks",
 "levels": [{"name": "intra", "ranks": 2}, {"name": "inter", "ranks": 3}],
 "buckets": [
  {"tensors": ["h.1.weight", "h.1.bias"], "codec": "topk(density=0.01)",
   "option": [{"op": "encode", "device": "cpu"}, {"op": "all_gather", "levels": ["intra", "inter"]},
              {"op": "decode", "device": "gpu"}]},
  {"tensors": ["h.0.weight"], "option": [{"op": "reduce_scatter", "levels": ["intra"]},
              {"op": "all_reduce", "levels": ["inter"]}, {"op": "all_gather", "levels": ["intra"]}]}],
 "predicted_step_ns": 81000000, "dense_step_ns": 190000000, "lower_bound_ns": 76000000,
 "options_considered": 4341, "planner_ns": 2100000, "notes": ["forward_ns is null"]})json";

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(Plan, IsReadAndWrittenBack) {
  const Result<Plan> read = plan_from_json(kText);
  ASSERT_TRUE(read.ok()) << read.status().to_string();
  const Plan& plan = read.value();
  EXPECT_EQ(plan.job, "gpt2");
  EXPECT_EQ(plan.topology.world_size(), 6);
  ASSERT_EQ(plan.buckets.size(), 2u);
  EXPECT_EQ(plan.buckets[0].tensors, (std::vector<std::string>{"h.1.weight", "h.1.bias"}));
  EXPECT_EQ(plan.buckets[0].option.to_string(plan.topology), "encode@cpu all_gather@flat decode@gpu");
  EXPECT_EQ(plan.buckets[1].codec, "none");
  EXPECT_EQ(plan.buckets[1].option.to_string(plan.topology), "reduce_scatter@intra all_reduce@inter all_gather@intra");
  EXPECT_EQ(plan.lower_bound_ns, 76000000);
  EXPECT_EQ(plan.notes, std::vector<std::string>{"forward_ns is null"});

  const std::string text = plan_to_json(plan);
  const Result<Plan> again = plan_from_json(text);
  ASSERT_TRUE(again.ok()) << again.status().to_string();
  EXPECT_EQ(plan_to_json(again.value()), text);
  EXPECT_EQ(plan_hash(again.value()), plan_hash(plan));
}

TEST(Plan, SizesAreReadAndWrittenAndPartOfTheHash) {
  const std::string text = replaced(kText, "\"codec\": \"topk", "\"elems\": [2359296, 0], \"codec\": \"topk");
  Plan plan = plan_from_json(text).value();
  EXPECT_EQ(plan.buckets[0].elems, (std::vector<std::int64_t>{2359296, 0}));
  EXPECT_TRUE(plan.buckets[1].elems.empty());
  EXPECT_EQ(plan_from_json(plan_to_json(plan)).value().buckets[0].elems, plan.buckets[0].elems);
  EXPECT_NE(plan_hash(plan), plan_hash(plan_from_json(kText).value()));
  plan.buckets[0].elems.pop_back();
  EXPECT_EQ(check_plan(plan).message(), "$.buckets[0].elems: expected one for each of the 2 tensors, got 1");
}

TEST(Plan, KeepsUnknownFieldsWhereTheyWere) {
  std::string text = replaced(kText, "\"job\"", "\"a/b\": {\"x\": [1, null]}, \"job\"");
  text = replaced(text, "\"ranks\": 3", "\"ranks\": 3, \"link\": \"25 Gb/s\"");
  text = replaced(text, "\"codec\": \"topk", "\"why\": \"slow link\", \"codec\": \"topk");
  text = replaced(text, "\"device\": \"gpu\"", "\"device\": \"gpu\", \"cost_ns\": 12");
  Plan plan = plan_from_json(text).value();
  EXPECT_EQ(plan.unknown, (UnknownFields{{"/a~1b", R"({"x":[1,null]})"}, {"/levels/1/link", "\"25 Gb/s\""}}));
  EXPECT_EQ(plan.buckets[0].unknown, (UnknownFields{{"/why", "\"slow link\""}, {"/option/2/cost_ns", "12"}}));
  const Plan again = plan_from_json(plan_to_json(plan)).value();
  EXPECT_EQ(again.unknown, plan.unknown);
  EXPECT_EQ(again.buckets[0].unknown, plan.buckets[0].unknown);
  plan.buckets[0].option.operations.clear();  // what belonged to its operations has no place any more
  plan.unknown["nowhere"] = plan.unknown["/~"] = plan.unknown["/job/x"] = "17";
  const std::string written = plan_to_json(plan);
  EXPECT_EQ(written.find("cost_ns"), std::string::npos);
  EXPECT_EQ(written.find("17"), std::string::npos);
}

// The check of its scheme, which few codecs need, took memory for each of the ranks.
TEST(Plan, IsCheckedWhateverTheNumberOfRanks) {
  const auto plan_of = [](const std::string& operations) {
    return plan_from_json(R"json({"format": "cortado.plan/1", "levels": [{"name": "a", "ranks": 46340},
        {"name": "b", "ranks": 46340}], "buckets": [{"tensors": ["w"], "codec": "power(rank=4)", "option": [)json" +
                          operations + "]}]}");
  };
  const std::string encode = R"({"op": "encode", "device": "cpu"}, )",
                    decode = R"(, {"op": "decode", "device": "cpu"})";
  const Result<Plan> plan = plan_of(encode + R"({"op": "all_gather", "levels": ["a", "b"]})" + decode);
  EXPECT_TRUE(plan.ok()) << plan.status().to_string();
  const std::string twice =
      R"({"op": "all_reduce", "levels": ["a"]}, )" + encode + R"({"op": "all_gather", "levels": ["b"]})" + decode;
  EXPECT_NE(plan_of(twice).status().message().find("$.buckets[0]: option: \"power(rank=4)\" is of low rank"),
            std::string::npos)
      << plan_of(twice).status().to_string();
}

TEST(Plan, RefusesWhatIsWrongWithPathAndExpectedForm) {
  struct Case {
    const char *from, *to, *message;
  };
  const std::vector<Case> cases = {
      {"\"cortado.plan/1\"", "\"cortado.job/1\"", "$.format: expected \"cortado.plan/1\", got \"cortado.job/1\""},
      {"\"job\": \"gpt2\"", "\"job\": 7", "$.job: expected a text, got 7"},
      {"\"levels\"", "\"levles\"", "$.levels: expected a list of levels, got nothing"},
      {"\"ranks\": 3", "\"ranks\": 0", "$.levels[1].ranks: expected an integer from 1 to 2147483647, got 0"},
      {"\"ranks\": 3", "\"ranks\": 2.5", "$.levels[1].ranks: expected an integer from 1 to 2147483647, got 2.5"},
      {"\"name\": \"inter\"", "\"name\": \"intra\"", "$.levels: topology: levels 0 and 1 are both named intra"},
      {"[\"h.1.weight\", \"h.1.bias\"]", "[\"h.1.weight\", 3]", "$.buckets[0].tensors[1]: expected a text, got 3"},
      {"[\"h.1.weight\", \"h.1.bias\"]", "[]", "$.buckets[0].tensors: expected at least one name, got none"},
      {"\"codec\": \"topk", "\"elems\": [8], \"codec\": \"topk",
       "$.buckets[0].elems: expected one for each of the 2 tensors, got 1"},
      {"\"codec\": \"topk", "\"elems\": [8, -1], \"codec\": \"topk",
       "$.buckets[0].elems[1]: expected a number of elements, at least 0, got -1"},
      {"\"codec\": \"topk", "\"elems\": 8, \"codec\": \"topk",
       "$.buckets[0].elems: expected a list of integers, got 8"},
      {"[\"h.0.weight\"]", "[\"h.1.bias\"]",
       "$.buckets[1].tensors[0]: expected each tensor once, got \"h.1.bias\" again"},
      {"\"codec\": \"topk(density=0.01)\"", "\"codec\": \"topk(density=2)\"",
       "$.buckets[0].codec: topk(density=2): density must be"},
      {"\"codec\": \"topk(density=0.01)\"", "\"codec\": \"rans\"", "$.buckets[0].codec: rans does not take fp32"},
      {"\"op\": \"encode\"", "\"op\": \"compress\"",
       "$.buckets[0].option[0].op: expected \"encode\", \"decode\", \"all_reduce\", \"reduce_scatter\", "
       "\"all_gather\", "
       "\"all_to_all\", \"reduce\", \"broadcast\" or \"gather\", got \"compress\""},
      {"\"device\": \"gpu\"", "\"device\": \"tpu\"",
       "$.buckets[0].option[2].device: expected \"cpu\" or \"gpu\", got \"tpu\""},
      {"[\"intra\", \"inter\"]", "[\"inter\", \"intra\"]",
       "$.buckets[0].option[1].levels[1]: expected names of $.levels, neighbours from the inside out: intra, inter, "
       "got \"intra\""},
      {"[\"intra\", \"inter\"]", "[]", "$.buckets[0].option[1].levels: expected at least one of intra, inter, got []"},
      {"\"op\": \"all_gather\"", "\"op\": \"all_reduce\"",
       "$.buckets[0]: option: operation 1 (all_reduce): payloads of this codec can't be summed"},
      {"{\"op\": \"decode\", \"device\": \"gpu\"}", "7", "$.buckets[0].option[2]: expected an object, got 7"},
      {"\"planner_ns\": 2100000", "\"planner_ns\": \"fast\"",
       "$.planner_ns: expected an integer from -1 to 9223372036854775807, got \"fast\""},
      {"[\"forward_ns is null\"]", "\"none\"", "$.notes: expected a list of texts, got \"none\""},
      {"\"planner_ns\": 2100000", "\"planner_ns\": -2",
       "$.planner_ns: expected an integer from -1 to 9223372036854775807, got -2"},
      {"\"planner_ns\": 2100000", "\"planner_ns\": NaN", "$.planner_ns: expected a finite number, got NaN (byte "},
      {"\"planner_ns\": 2100000", "\"job\": \"gpt2\"", "$.job: expected one of them, got a second one"},
      {"{\"format\"", "[\"format\"", "$[1]: expected JSON, got \":\" (byte 10)"},
  };
  for (const Case& wrong : cases) {
    const Result<Plan> plan = plan_from_json(replaced(kText, wrong.from, wrong.to));
    ASSERT_FALSE(plan.ok()) << wrong.message;
    EXPECT_NE(plan.status().message().find(wrong.message), std::string::npos) << plan.status().message();
  }
  const Result<Plan> later = plan_from_json(replaced(kText, "cortado.plan/1", "cortado.plan/2"));
  EXPECT_EQ(later.status().code(), StatusCode::kUnsupported);
}

TEST(Plan, TheHashIsOfWhatIsDone) {
  const Plan plan = plan_from_json(kText).value();
  const auto hash_with = [&](const auto& change) {
    Plan changed = plan;
    change(changed);
    return plan_hash(changed);
  };
  EXPECT_EQ(hash_with([](Plan& p) { p.predicted_step_ns = 1, p.planner_ns = 2, p.notes.clear(), p.job = "x"; }),
            plan_hash(plan));
  EXPECT_EQ(hash_with([](Plan& p) { p.buckets[0].codec = "topk(0.01)"; }), plan_hash(plan));
  EXPECT_NE(hash_with([](Plan& p) { p.buckets[0].codec = "topk(0.02)"; }), plan_hash(plan));
  EXPECT_NE(hash_with([](Plan& p) { p.buckets[0].error_feedback = false; }), plan_hash(plan));
  EXPECT_NE(hash_with([](Plan& p) { std::swap(p.buckets[0].tensors[0], p.buckets[0].tensors[1]); }), plan_hash(plan));
  EXPECT_NE(hash_with([](Plan& p) { std::swap(p.buckets[0], p.buckets[1]); }), plan_hash(plan));
  EXPECT_NE(hash_with([](Plan& p) { p.topology.levels[1].ranks = 4; }), plan_hash(plan));
  EXPECT_NE(hash_with([](Plan& p) { p.buckets[0].option.operations[2].device = OpDevice::kCpu; }), plan_hash(plan));
}

TEST(Plan, Files) {
  const std::string path = temporary_directory() / "plan.json";
  ASSERT_TRUE(save_plan(plan_from_json(kText).value(), path).ok());
  EXPECT_EQ(plan_hash(load_plan(path).value()), plan_hash(plan_from_json(kText).value()));
  ASSERT_TRUE(std::filesystem::remove(path));
  EXPECT_EQ(load_plan(path).status().code(), StatusCode::kIoError);
  EXPECT_EQ(save_plan({}, "/nowhere/plan.json").code(), StatusCode::kIoError);
}

}  // namespace
}  // namespace cortado
