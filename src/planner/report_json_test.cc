// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "cortado/planner.h"

namespace cortado {
namespace {

nlohmann::json data_of(const std::string& page) {
  const std::string open = "<script id=\"data\" type=\"application/json\">";
  const std::size_t from = page.find(open) + open.size();
  return nlohmann::json::parse(page.substr(from, page.find("</script>", from) - from));
}

// The page itself is tried in a browser: tests/python/test_cli_plan.py.
TEST(ReportToHtml, HoldsWhatItShows) {
  const Job job = load_job("tests/data/planner/jobs/lstm.json").value();
  const Cluster cluster = load_cluster("tests/data/planner/clusters/pcie_25g.json").value();
  Plan plan = make_plan(job, cluster, {}, "dense").value();
  plan.notes.push_back("<!--<script> is no comment");  // the page stayed blank
  plan.notes.push_back("</script> is no end");
  Explanation explanation;
  explanation.step_ns = plan.predicted_step_ns;
  explanation.totals = {{"dense", plan.predicted_step_ns}, {"bf16", -1}};
  explanation.buckets.resize(plan.buckets.size());
  explanation.buckets[0].others = {
      {.codec = "none", .option = plan.buckets[0].option, .step_ns = 1, .reason = "longer"},
      {.codec = "sign", .option = {}, .reason = "no candidate"}};
  const std::string page = report_to_html(plan, job, cluster, explanation).value();
  EXPECT_EQ(page.find("<!--"), std::string::npos);
  const nlohmann::json data = data_of(page);
  ASSERT_EQ(data["timelines"].size(), 2u);
  EXPECT_EQ(data["timelines"][1]["step_ns"], plan.predicted_step_ns);
  EXPECT_EQ(data["timelines"][1]["events"][0].size(), 5u);
  EXPECT_EQ(data["tensors"].size(), job.tensors.size());
  ASSERT_EQ(data["totals"].size(), 3u);
  EXPECT_EQ(data["totals"][0], (nlohmann::json::array({"this plan", plan.predicted_step_ns})));
  EXPECT_EQ(data["numbers"][0][0], "step");
  EXPECT_EQ(data["notes"].back(), "</script> is no end");
  EXPECT_EQ(data["notes"][data["notes"].size() - 2], "<!--<script> is no comment");
  EXPECT_TRUE(data["compared"].empty());
  ASSERT_EQ(data["ways"].size(), plan.buckets.size());
  EXPECT_EQ(data["ways"][0][0], (nlohmann::json::array({plan.buckets[0].option.to_string(plan.topology), "longer"})));
  EXPECT_EQ(data["ways"][0][1], (nlohmann::json::array({"sign", "no candidate"})));
}

// Searched for as long as the plan was.
TEST(ReportToHtml, ComparesWithTheDensePlanThatThePlanWasComparedWith) {
  const Job job = load_job("tests/data/planner/jobs/gpt2.json").value();
  const Cluster cluster = load_cluster("tests/data/planner/clusters/pcie_25g.json").value();
  const PlannerConstraints constraints = {.allowed_codecs = {"cast(fp16)"}, .search_steps = 600000};
  const Plan plan = make_plan(job, cluster, constraints).value();
  Explanation explanation;
  explanation.step_ns = plan.predicted_step_ns;
  explanation.buckets.resize(plan.buckets.size());
  const auto dense_of = [&](std::int64_t search_steps) -> std::int64_t {
    return data_of(
        report_to_html(plan, job, cluster, explanation, nullptr, search_steps).value())["timelines"][0]["step_ns"];
  };
  EXPECT_EQ(dense_of(constraints.search_steps), plan.dense_step_ns);
  EXPECT_NE(dense_of(0), plan.dense_step_ns);
}

TEST(ReportToHtml, ShowsATraceBesideThePlan) {
  const Job job = load_job("tests/data/planner/jobs/lstm.json").value();
  const Cluster cluster = load_cluster("tests/data/planner/clusters/pcie_25g.json").value();
  const Plan plan = make_plan(job, cluster, {}, "dense").value();
  Explanation explanation;
  explanation.step_ns = plan.predicted_step_ns;
  explanation.buckets.resize(plan.buckets.size());
  Trace trace;
  trace.tensors = {"decoder.bias"};
  trace.events = {{.stage = Stage::kEncode, .message = 0, .tensor = 0, .start_ns = 1000, .end_ns = 9001000}};
  const nlohmann::json data = data_of(report_to_html(plan, job, cluster, explanation, &trace).value());
  ASSERT_EQ(data["timelines"].size(), 3u);
  EXPECT_EQ(data["timelines"][2]["step_ns"], 9000000);
  ASSERT_EQ(data["compared"].size(), 3u);
  EXPECT_EQ(data["compared"][0][0], "exchange");
  EXPECT_EQ(data["compared"][0][1],
            compare_with_trace(simulate_plan(plan, job, cluster).value(), trace)[0].predicted_ns);
  EXPECT_EQ(data["compared"][0][2], 9000000);
}

}  // namespace
}  // namespace cortado
