// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "session/step_prediction.h"

#include <gtest/gtest.h>

#include "cortado/planner.h"
#include "session/cluster_testing.h"

namespace cortado {
namespace {

// A sample of the first values of each would miss what most of a model is: rows of dead units, the range of a whole
// gradient.
TEST(StepPrediction, GradientsAreSampledWhole) {
  constexpr std::int64_t kMi = 1 << 20;
  using Elems = std::map<std::uint32_t, std::int64_t>;
  const EngineTensor bias{.name = "bias", .rows = 1, .cols = 4096, .dimensions = 1};
  const EngineTensor small{.name = "small", .rows = 10, .cols = 64};
  const EngineTensor large{.name = "large", .rows = 2048, .cols = 3460};
  const EngineTensor huge{.name = "huge", .rows = 20 * 1024, .cols = 1024};
  EXPECT_EQ(sampled_elems({bias, small, large}), (Elems{{1, 640}, {2, 2048 * 3460}}));
  EXPECT_EQ(sampled_elems({small, huge}), (Elems{{1, 8 * kMi}}));
  EXPECT_EQ(sampled_elems({large, large, large}), (Elems{{0, 2048 * 3460}, {1, 8 * kMi - 2048 * 3460}}));
  EXPECT_EQ(sampled_elems({bias}), Elems());
}

// Layers of 4 MB, ready one after the other.
Job job_of_layers(int count, std::int64_t apart_ns) {
  Job job;
  job.name = "layers";
  job.device = OpDevice::kCpu;
  for (int layer = 1; layer <= count; ++layer) {
    JobTensor& tensor = job.tensors.emplace_back();
    tensor.name = "layer" + std::to_string(count - layer);
    tensor.shape = {1000, 1000};
    tensor.ready_ns = apart_ns * layer;
  }
  return job;
}

// Of a step that sends each gradient on its own.
std::int64_t dense_step_ns(const Job& job, const Cluster& cluster) {
  Plan plan;
  plan.topology = cluster.topology();
  for (const JobTensor& tensor : job.tensors) {
    PlanBucket& bucket = plan.buckets.emplace_back();
    bucket.tensors = {tensor.name};
    bucket.option.operations = {{.kind = OpKind::kAllReduce, .levels = {0, 1}}};
  }
  return simulate_plan(plan, job, cluster).value().step_ns;
}

TEST(StepPrediction, LinksAreAsBusyAsTheDenseStepsShow) {
  const Job job = job_of_layers(2, 50'000'000);
  // Of the slowest link: 4 MB at 10 Mb/s take seconds.
  const Cluster cluster = two_machines(500, {"cast(bf16)"});
  const auto time_of = [](const Cluster& of) {
    return of.levels[1].collectives.at(OpKind::kAllReduce).times_ns.back();
  };
  const std::int64_t measured_ns = dense_step_ns(job, cluster);
  ASSERT_GT(measured_ns, 500'000'000);
  const std::int64_t seen_ns = measured_ns * 13 / 10;
  const auto as_steps_show = [&](const Cluster& of, std::int64_t dense_ns) {
    const MeasuredSteps steps{.ready_ns = {}, .dense_ns = dense_ns, .samples = {}};
    return as_dense_steps_show(of, job, steps, true).value();
  };
  const Cluster slower = as_steps_show(cluster, seen_ns);
  EXPECT_NEAR(static_cast<double>(dense_step_ns(job, slower)) / static_cast<double>(seen_ns), 1, 0.01);
  EXPECT_GT(time_of(slower), time_of(cluster));
  // Never by more than a factor of two.
  EXPECT_NEAR(
      static_cast<double>(time_of(as_steps_show(cluster, 9 * measured_ns))) / static_cast<double>(time_of(cluster)), 2,
      0.01);
  // A link that hardly counts is left as it is, whatever the steps took.
  const Cluster fast = two_machines(0, {"cast(bf16)"});
  EXPECT_EQ(time_of(as_steps_show(fast, 900'000'000)), time_of(fast));
}

// How much transfers slow the backward pass down is what makes the last gradient of dense steps as late as it was.
TEST(StepPrediction, TheBackwardPassIsSlowedAsTheDenseStepsShow) {
  const Job job = job_of_layers(3, 400'000'000);
  Cluster cluster = two_machines(20, {"cast(bf16)"});
  const std::int64_t transfer_ns = dense_step_ns(job, cluster) - 1'200'000'000;  // the last one's
  ASSERT_GT(transfer_ns, 50'000'000);
  ASSERT_LT(transfer_ns, 300'000'000);
  const auto slowed_by = [&](std::int64_t dense_ready_ns) {
    return with_slowed_backward(cluster, job, dense_ready_ns, true).value().transfers_slow_backward.value();
  };
  EXPECT_EQ(slowed_by(0), 0);
  EXPECT_EQ(slowed_by(1'200'000'000), 0);
  // Two of three run before the last gradient is ready.
  EXPECT_NEAR(slowed_by(1'200'000'000 + transfer_ns), 0.5, 0.01);
  EXPECT_NEAR(slowed_by(5'000'000'000), 1, 0.01);
  // Gradients were ready so late but for the time that the engine had taken until then.
  cluster.collective_start_ns = 50'000'000;
  EXPECT_NEAR(slowed_by(1'200'000'000 + transfer_ns), 0.5, 0.01);
  // What was measured otherwise does not count.
  cluster.transfers_slow_backward = 0.9;
  EXPECT_NEAR(slowed_by(1'200'000'000 + transfer_ns), 0.5, 0.01);
}

}  // namespace
}  // namespace cortado
