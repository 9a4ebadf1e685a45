// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What `cortado simulate PLAN JOB CLUSTER` prints of fixed plans. After a change of the model look at the difference,
// and write the files anew with that command.
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <string>
#include <utility>

#include "cortado/planner.h"

namespace cortado {
namespace {

TEST(TimelineGolden, TextsOfFixedPlans) {
  const std::string data = "tests/data/planner/";
  for (const auto& [job_name, cluster_name] : {std::pair("lstm", "pcie_25g"), std::pair("vgg16", "nvlink_100g")}) {
    const std::string path = data + "timelines/" + job_name + "_on_" + cluster_name;
    const Plan plan = load_plan(path + ".json").value();
    const Job job = load_job(data + "jobs/" + job_name + ".json").value();
    const Cluster cluster = load_cluster(data + "clusters/" + cluster_name + ".json").value();
    const Timeline timeline = simulate_plan(plan, job, cluster).value();
    std::ifstream file(path + ".txt");
    const std::string golden(std::istreambuf_iterator<char>(file), {});
    EXPECT_EQ(timeline_to_text(timeline, plan), golden) << path;
    EXPECT_EQ(timeline.step_ns, plan.predicted_step_ns) << path;
  }
}

}  // namespace
}  // namespace cortado
