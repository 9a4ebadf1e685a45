// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What does the planner find on Espresso's six jobs and two testbeds, how far is that from the lower bound and from what
// other strategies find, and how long does it take?
//
//   planner_bench [JOB]     all jobs, or one; the rows of docs/results/planner.md
//
// Every plan is first checked: it covers the job, and the simulator gives the time that was promised. Planning times are
// medians of five, of make_plan() as a whole: no file is read meanwhile, nothing is scaled.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "cortado/planner.h"
#include "cortado/trace.h"

namespace cortado {
namespace {

constexpr const char* kData = "tests/data/planner/";
constexpr int kRounds = 5;

double milliseconds(std::int64_t ns) { return static_cast<double>(ns) * 1e-6; }

struct Planned {
  Plan plan;
  double planner_ms = 0;
};

Planned plan_timed(const Job& job, const Cluster& cluster, const PlannerConstraints& constraints, int rounds) {
  Planned planned;
  std::vector<double> times;
  for (int round = 0; round < rounds; ++round) {
    const std::int64_t start_ns = steady_clock()->now_ns();
    planned.plan = make_plan(job, cluster, constraints).value();
    times.push_back(milliseconds(steady_clock()->now_ns() - start_ns));
  }
  std::sort(times.begin(), times.end());
  planned.planner_ms = times[times.size() / 2];
  return planned;
}

Cluster with_free_codecs(Cluster cluster) {
  for (CodecTimes& times : cluster.codecs) std::fill(times.curve.times_ns.begin(), times.curve.times_ns.end(), 0);
  cluster.host_to_device = cluster.device_to_host = {};
  return cluster;
}

bool run_case(const Job& job, const Cluster& cluster, const char* codec, bool smoke) {
  PlannerConstraints constraints;
  if (*codec != '\0') constraints.allowed_codecs = {codec};
  const Planned planned = plan_timed(job, cluster, constraints, smoke ? 1 : kRounds);
  const std::int64_t step_ns = planned.plan.predicted_step_ns;
  if (simulate_plan(planned.plan, job, cluster).value().step_ns != step_ns) {
    std::printf("%s on %s: the simulator does not agree\n", job.name.c_str(), cluster.name.c_str());
    return false;
  }
  std::printf("| %s | %s | %s | **%.2f** ", cluster.name.c_str(), job.name.c_str(), *codec == '\0' ? "all" : codec, milliseconds(step_ns));
  std::int64_t best_encoding_ns = 0;
  for (const std::string& strategy : planner_strategies()) {
    if (strategy == "cortado") continue;
    const Result<Plan> other = make_plan(job, cluster, constraints, strategy);
    if (!other.ok()) {
      std::printf("| - ");
      continue;
    }
    const std::int64_t other_ns = other.value().predicted_step_ns;
    std::printf("| %.2f%s", milliseconds(other_ns), other_ns < step_ns && strategy != "bf16" ? " (BETTER) " : " ");
    const bool encodes = strategy != "dense" && strategy != "bf16";
    if (encodes && (best_encoding_ns == 0 || other_ns < best_encoding_ns)) best_encoding_ns = other_ns;
  }
  const std::int64_t free_ns = make_plan(job, with_free_codecs(cluster), constraints).value().predicted_step_ns;
  std::size_t encoded = 0;
  for (const PlanBucket& bucket : planned.plan.buckets) encoded += bucket.option.encodes() > 0;
  std::printf("| %.2f | %.2f | %.2f %% | %.3f | %zu/%zu | %lld | %.2f |\n", milliseconds(free_ns),
              milliseconds(planned.plan.lower_bound_ns),
              100.0 * static_cast<double>(step_ns - planned.plan.lower_bound_ns) / static_cast<double>(planned.plan.lower_bound_ns),
              static_cast<double>(best_encoding_ns) / static_cast<double>(step_ns), encoded, planned.plan.buckets.size(),
              static_cast<long long>(planned.plan.options_considered), planned.planner_ms);
  std::fflush(stdout);
  return true;
}

int run(const char* only, bool smoke) {
  std::printf("| cluster | job | codecs | cortado ");
  for (const std::string& strategy : planner_strategies()) {
    if (strategy != "cortado") std::printf("| %s ", strategy.c_str());
  }
  std::printf("| free | bound | gap | factor | encoded | options | plan ms |\n");
  bool sound = true;
  for (const char* cluster_name : {"nvlink_100g", "pcie_25g"}) {
    const Cluster cluster = load_cluster(std::string(kData) + "clusters/" + cluster_name + ".json").value();
    for (const char* job_name : {"vgg16", "resnet101", "ugatit", "bert_base", "gpt2", "lstm"}) {
      if (only != nullptr && std::strcmp(only, job_name) != 0) continue;
      const Job job = load_job(std::string(kData) + "jobs/" + job_name + ".json").value();
      for (const char* codec : {"randk(density=0.01)", "topk(density=0.01)", "sign(scale=mean_abs)", ""}) {
        sound &= run_case(job, cluster, codec, smoke);
      }
    }
  }
  return sound ? 0 : 1;
}

}  // namespace
}  // namespace cortado

int main(int argc, char** argv) {
  const char* only = nullptr;
  bool smoke = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], "--benchmark_min_time", 20) == 0) {
      smoke = true;
      only = "lstm";
    } else if (argv[i][0] != '-') {
      only = argv[i];
    }
  }
  return cortado::run(only, smoke);
}
