// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/planner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "cortado/codec.h"
#include "cortado/printable.h"
#include "planner/simulate/timeline.h"

namespace cortado {
namespace {

TimeCurve constant(std::int64_t ns) { return {{1, 1 << 30}, {ns, ns}}; }

// Lemma 1's counterexample as a job on a cluster: dense is slow, payloads take 5 whatever their size.
struct LemmaOne {
  LemmaOne() {
    cluster.name = "lemma";
    ClusterLevel level = {"all", 2, "", {}, {}};
    for (int k = static_cast<int>(OpKind::kAllReduce); k <= static_cast<int>(OpKind::kGather); ++k) {
      level.collectives[static_cast<OpKind>(k)] = constant(40000000);
    }
    level.collectives[OpKind::kAllGather] = constant(5000000);
    cluster.levels = {level};
    for (const auto& [device, ns] : {std::pair(OpDevice::kGpu, 100000), std::pair(OpDevice::kCpu, 1500000)}) {
      cluster.codecs.push_back({"sign(scale=mean_abs)", device, OpKind::kEncode, 1, {{1, 1000}, {ns, ns}}, {}});
      cluster.codecs.push_back({"sign(scale=mean_abs)", device, OpKind::kDecode, 1, {{1, 1000}, {0, 0}}, {}});
    }
    cluster.gpu_codec_slows_backward = 1;
    job.name = "two";
    for (int t = 0; t < 2; ++t) {
      JobTensor tensor;
      tensor.name = "t" + std::to_string(t);
      tensor.shape = {1000};
      tensor.ready_ns = (t + 1) * 1000000;
      job.tensors.push_back(tensor);
    }
  }
  std::int64_t step_ns(const std::string& first, const std::string& second) const {
    Plan plan;
    plan.topology = cluster.topology();
    for (const std::string& device : {first, second}) {
      PlanBucket bucket;
      bucket.tensors = {"t" + std::to_string(plan.buckets.size())};
      bucket.codec = "sign(scale=mean_abs)";
      bucket.option = Option::parse("encode@" + device + " all_gather@all decode@" + device, plan.topology).value();
      plan.buckets.push_back(bucket);
    }
    return simulate_plan(plan, job, cluster).value().step_ns;
  }
  Job job;
  Cluster cluster;
};

TEST(MakePlan, LemmaOneIsSolvedOptimally) {
  const LemmaOne example;
  EXPECT_EQ(example.step_ns("cpu", "gpu"), 12100000);
  EXPECT_EQ(example.step_ns("gpu", "cpu"), 11100000);
  EXPECT_EQ(example.step_ns("gpu", "gpu"), 11100000);
  EXPECT_EQ(example.step_ns("cpu", "cpu"), 12500000);
  Job job = example.job;
  job.tensors[1].dtype = DType::kBFloat16;  // cannot be fused with the other: the lemma knows no fusion
  const Plan plan = make_plan(job, example.cluster, {}).value();
  EXPECT_EQ(plan.predicted_step_ns, 11100000);
}

TEST(SimulatePlan, TheForwardPassAndTheOptimizerAreWaitedFor) {
  LemmaOne example;
  example.job.forward_ns = 2'000'000;
  example.job.optimizer_ns = 1'000'000;
  EXPECT_EQ(example.step_ns("cpu", "gpu"), 12100000 + 3'000'000);
  EXPECT_EQ(example.step_ns("gpu", "cpu"), 11100000 + 3'000'000);
  example.job.tensors[1].dtype = DType::kBFloat16;
  const Plan plan = make_plan(example.job, example.cluster, {}).value();
  EXPECT_EQ(plan.predicted_step_ns, 11100000 + 3'000'000);
  EXPECT_LE(plan.lower_bound_ns, plan.predicted_step_ns);
}

// As engines of settings do, but for casts.
TEST(MakePlan, KeepsWhatCodecsLose) {
  for (const std::string codec : {"cast(fp16)", "fp8(e4m3)", "sign(scale=mean_abs)"}) {
    LemmaOne example;
    for (CodecTimes& times : example.cluster.codecs) times.codec = codec;
    const Plan plan = make_plan(example.job, example.cluster, {}).value();
    for (const PlanBucket& bucket : plan.buckets) {
      ASSERT_EQ(bucket.codec, codec);
      EXPECT_EQ(bucket.error_feedback, codec != "cast(fp16)") << codec;
    }
  }
}

// Each tensor by itself, all of them so.
Plan plan_of_tensors(const LemmaOne& example, const char* option, const char* codec) {
  Plan plan;
  plan.topology = example.cluster.topology();
  for (const JobTensor& tensor : example.job.tensors) {
    plan.buckets.push_back(
        {.tensors = {tensor.name}, .option = Option::parse(option, plan.topology).value(), .codec = codec});
  }
  return plan;
}

TEST(SimulateMessages, SizesTravelWithThePayloads) {
  LemmaOne example;
  for (CodecTimes& times : example.cluster.codecs) times.codec = "topk(density=0.01)";
  const Plan plan = plan_of_tensors(example, "encode@gpu all_gather@all decode@gpu", "topk(density=0.01)");
  constexpr std::int64_t kGatherNs = 5'000'000;  // of sizes as of payloads
  const Timeline messages = simulate_messages(plan, example.job, example.cluster).value();
  EXPECT_EQ(messages.step_ns, 1'000'000 + 100'000 + 2 * kGatherNs);
  EXPECT_EQ(simulate_plan(plan, example.job, example.cluster).value().step_ns, messages.step_ns + 2 * kGatherNs);
}

// Of two buckets that are ready together the first is sent before the second is encoded: starting takes the thread that
// encodes, and comes at once.
TEST(SimulatePlan, WhatIsEncodedIsSentBeforeTheNextBucketIsEncoded) {
  LemmaOne example;
  example.job.device = OpDevice::kCpu;
  for (JobTensor& tensor : example.job.tensors) tensor.ready_ns = example.job.tensors.back().ready_ns;
  constexpr std::int64_t kStartNs = 700'000;
  example.cluster.collective_start_ns = kStartNs;
  const Plan plan = plan_of_tensors(example, "encode@cpu all_gather@all decode@cpu", "sign(scale=mean_abs)");
  const Timeline timeline = simulate_plan(plan, example.job, example.cluster).value();
  const auto event = [&](const char* name, int bucket) {
    const auto found = std::find_if(timeline.events.begin(), timeline.events.end(),
                                    [&](const TimelineEvent& of) { return of.name == name && of.bucket == bucket; });
    EXPECT_NE(found, timeline.events.end()) << name << " of bucket " << bucket;
    return found == timeline.events.end() ? TimelineEvent() : *found;
  };
  for (const int bucket : {0, 1}) {
    EXPECT_GT(event("encode", bucket).end_ns, event("encode", bucket).start_ns);
    EXPECT_EQ(event("start", bucket).start_ns, event("encode", bucket).end_ns);
    EXPECT_EQ(event("start", bucket).end_ns - event("start", bucket).start_ns, kStartNs);
  }
  EXPECT_EQ(event("all_gather", 0).start_ns, event("start", 0).end_ns);
  EXPECT_EQ(event("encode", 1).start_ns, event("start", 0).end_ns);
}

// With a slow decoder on the GPU one of the two tensors is best offloaded, the later one. Algorithm 2, by the lemma,
// offloads the earlier one or both.
TEST(MakePlan, OffloadsTheLaterTensorWhereLemmaOneTakesTheEarlierOne) {
  LemmaOne example;
  for (CodecTimes& times : example.cluster.codecs) {
    if (times.device == OpDevice::kGpu && times.direction == OpKind::kDecode) times.curve.times_ns = {2000000, 2000000};
  }
  EXPECT_EQ(example.step_ns("gpu", "gpu"), 15100000);
  EXPECT_EQ(example.step_ns("cpu", "gpu"), 12100000);
  EXPECT_EQ(example.step_ns("cpu", "cpu"), 12500000);
  EXPECT_EQ(example.step_ns("gpu", "cpu"), 11100000);
  Job job = example.job;
  job.tensors[1].dtype = DType::kBFloat16;
  EXPECT_EQ(make_plan(job, example.cluster, {}).value().predicted_step_ns, 11100000);
  EXPECT_EQ(make_plan(job, example.cluster, {}, "espresso").value().predicted_step_ns, 12100000);
}

Job job_named(const std::string& name) { return load_job("tests/data/planner/jobs/" + name + ".json").value(); }
Cluster cluster_named(const std::string& name) {
  return load_cluster("tests/data/planner/clusters/" + name + ".json").value();
}

// A bucket of 199 tensors pays 199 times for what is encoded and decoded, so what is best for one tensor of that size
// is not best for it. Machines of 8 GPUs, 8 of them at a site, four sites with 20 ms between them.
TEST(MakePlan, FindsWhatIsBestForBucketsOfManyTensors) {
  Cluster cluster = cluster_named("nvlink_100g");
  cluster.levels.clear();
  cluster.ranges.clear();
  struct Link {
    const char* name;
    int ranks;
    double hop_ns, ns_per_byte;
  };
  for (const auto& [name, ranks, hop_ns, ns_per_byte] :
       {Link{"intra", 8, 1e4, 8.0 / 1200}, Link{"inter", 8, 1e4, 0.08}, Link{"wan", 4, 2e7, 0.8}}) {
    ClusterLevel& level = cluster.levels.emplace_back();
    level.name = name;
    level.ranks = ranks;
    const auto set = [&, hop = hop_ns, byte = ns_per_byte](OpKind kind, double hops, double shares) {
      TimeCurve& curve = level.collectives[kind];
      for (std::int64_t size = 1024; size <= std::int64_t{1} << 34; size *= 4) {
        curve.sizes.push_back(size);
        curve.times_ns.push_back(std::llround(hops * hop + shares * byte * static_cast<double>(size)));
      }
    };
    const double others = ranks - 1, share = others / ranks, tree = std::ceil(std::log2(ranks));
    set(OpKind::kAllReduce, 2 * others, 2 * share);
    for (const OpKind kind : {OpKind::kReduceScatter, OpKind::kAllGather, OpKind::kAllToAll}) set(kind, others, share);
    for (const OpKind kind : {OpKind::kReduce, OpKind::kBroadcast}) set(kind, tree, 1);
    set(OpKind::kGather, tree, share);
  }
  const Job job = job_named("bert_base");
  const std::int64_t all_cast_ns = make_plan(job, cluster, {}, "bf16").value().predicted_step_ns;
  EXPECT_LE(make_plan(job, cluster, {.allowed_codecs = {"cast(fp16)"}}).value().predicted_step_ns, all_cast_ns);
}

TEST(MakePlan, PlansOfEspressosJobsAreSound) {
  for (const char* cluster_name : {"nvlink_100g", "pcie_25g"}) {
    const Cluster cluster = cluster_named(cluster_name);
    for (const char* job_name : {"vgg16", "lstm", "bert_base"}) {
      const Job job = job_named(job_name);
      const Result<Plan> made = make_plan(job, cluster, {});
      ASSERT_TRUE(made.ok()) << made.status().to_string();
      const Plan& plan = made.value();
      EXPECT_TRUE(check_plan(plan).ok()) << check_plan(plan).to_string();
      EXPECT_LE(plan.lower_bound_ns, plan.predicted_step_ns);
      EXPECT_LE(plan.predicted_step_ns, plan.dense_step_ns);
      EXPECT_GE(plan.lower_bound_ns, job.backward_end_ns());
      const Result<Timeline> timeline = simulate_plan(plan, job, cluster);
      ASSERT_TRUE(timeline.ok()) << timeline.status().to_string();
      EXPECT_EQ(timeline.value().step_ns, plan.predicted_step_ns);  // one simulator for all
      EXPECT_EQ(plan_to_json(make_plan(job, cluster, {}).value()), plan_to_json(plan));
    }
  }
}

// Which are sums over all levels at once, and few others.
TEST(MakePlan, PlansOfLowRankAreThoseThatEnginesTake) {
  Job job = job_named("lstm");
  for (JobTensor& tensor : job.tensors) {
    const std::int64_t elems = tensor.elems();
    tensor.shape = elems % 100 == 0 ? std::vector<std::int64_t>{100, elems / 100} : std::vector<std::int64_t>{elems};
  }
  for (const char* codec : {"power(rank=4)", "acp(rank=4)"}) {
    for (const char* cluster_name : {"nvlink_100g", "pcie_25g"}) {
      Cluster cluster = cluster_named(cluster_name);
      std::erase_if(cluster.codecs, [](const CodecTimes& times) { return !times.codec.starts_with("topk"); });
      for (CodecTimes& times : cluster.codecs) times.codec = codec;
      bool encodes = false;
      for (const std::string& strategy : planner_strategies()) {
        SCOPED_TRACE(std::string(codec) + " on " + cluster_name + ", " + strategy);
        const Result<Plan> made = make_plan(job, cluster, {}, strategy);
        const bool is_fixed = strategy.ends_with("_like") || strategy.ends_with("_only") || strategy == "bf16";
        ASSERT_TRUE(made.ok() || is_fixed) << made.status().to_string();
        if (!made.ok()) continue;
        const Plan& plan = made.value();
        EXPECT_TRUE(check_plan(plan).ok()) << check_plan(plan).to_string();
        EXPECT_LE(plan.lower_bound_ns, plan.predicted_step_ns);
        for (const PlanBucket& bucket : plan.buckets) encodes |= bucket.option.encodes() > 0;
        const Result<Timeline> timeline = simulate_plan(plan, job, cluster);
        ASSERT_TRUE(timeline.ok()) << timeline.status().to_string();
        EXPECT_EQ(timeline.value().step_ns, plan.predicted_step_ns);
      }
      EXPECT_TRUE(encodes);
    }
  }
}

// benchmarks/planner/planner_bench.cc compares more, and times it.
TEST(MakePlan, IsNoWorseThanEspressoOnItsJobs) {
  for (const char* cluster_name : {"nvlink_100g", "pcie_25g"}) {
    const Cluster cluster = cluster_named(cluster_name);
    for (const char* job_name : {"vgg16", "ugatit", "bert_base", "lstm"}) {
      const Job job = job_named(job_name);
      for (const char* codec : {"randk(density=0.01)", "topk(density=0.01)", "sign(scale=mean_abs)", "cast(fp16)"}) {
        const PlannerConstraints constraints = {.allowed_codecs = {codec}};
        EXPECT_LE(make_plan(job, cluster, constraints).value().predicted_step_ns,
                  make_plan(job, cluster, constraints, "espresso").value().predicted_step_ns)
            << job_name << " on " << cluster_name << ", " << codec;
      }
    }
  }
}

// Levels that take 2 ns a byte outside and 0.02 within; curves end at 64 MiB, and at 4 M elements.
Cluster two_levels(std::vector<std::pair<const char*, std::int64_t>> codecs) {
  Cluster cluster;
  cluster.name = "two levels";
  for (const auto& [name, ranks, largest_ns] :
       {std::tuple("intra", 8, std::int64_t{1362177}), std::tuple("inter", 4, std::int64_t{134267728})}) {
    ClusterLevel level = {name, ranks, "", {}, {}};
    for (int k = static_cast<int>(OpKind::kAllReduce); k <= static_cast<int>(OpKind::kGather); ++k) {
      const OpKind kind = static_cast<OpKind>(k);
      level.collectives[kind] = {{4096, 64 << 20}, {50000, kind == OpKind::kAllReduce ? largest_ns : largest_ns / 2}};
    }
    cluster.levels.push_back(level);
  }
  for (const auto& [codec, largest_ns] : codecs) {
    for (const OpKind direction : {OpKind::kEncode, OpKind::kDecode}) {
      cluster.codecs.push_back({.codec = codec,
                                .device = OpDevice::kGpu,
                                .direction = direction,
                                .curve = {{1024, 4 << 20}, {20000, largest_ns}},
                                .unknown = {}});
    }
  }
  return cluster;
}

Job equal_tensors(int count, std::int64_t elems) {
  Job job;
  job.name = "equal";
  for (int t = 0; t < count; ++t) {
    JobTensor tensor;
    tensor.name = "t" + std::to_string(t);
    tensor.shape = {elems};
    tensor.ready_ns = (t + 1) * 1000000;
    job.tensors.push_back(tensor);
  }
  return job;
}

// A gap of the link while the last tensor is decoded and encoded again, between its own two collectives, would stay as
// long if less went before it: Algorithm 1 must not leave the others alone for it.
TEST(MakePlan, EspressoKeepsWhatGoesBeforeAGapOfOneTensor) {
  Job job = equal_tensors(20, 1 << 20);
  for (std::size_t t = 1; t < job.tensors.size(); t += 2) job.tensors[t].dtype = DType::kFloat16;  // nothing is fused
  const Cluster cluster = two_levels({{"topk(density=0.01)", 20991520}});
  const std::int64_t dense_ns = make_plan(job, cluster, {}, "dense").value().predicted_step_ns;
  EXPECT_LT(make_plan(job, cluster, {}, "espresso").value().predicted_step_ns, dense_ns * 3 / 5);
}

// Nor for one before a tensor that waits for the inner link, which those before it occupy.
TEST(MakePlan, EspressoKeepsWhatGoesBeforeATensorThatWaitsForAnotherLink) {
  Job job = equal_tensors(20, 1 << 20);
  for (std::size_t t = 1; t < job.tensors.size(); t += 2) job.tensors[t].dtype = DType::kFloat16;
  Cluster cluster = two_levels({{"topk(density=0.01)", 229715}});
  ClusterRange& flat = cluster.ranges.emplace_back();
  flat.levels = {0, 1};
  for (auto& [kind, curve] : cluster.levels[0].collectives) curve.times_ns.back() = 134217728;
  for (auto& [kind, curve] : cluster.levels[1].collectives) curve.times_ns.back() = 33554432;
  for (const auto& [kind, curve] : cluster.levels[0].collectives) {
    flat.collectives[kind] = {{4096, 64 << 20}, {100000, 1342177280}};
  }
  const std::int64_t dense_ns = make_plan(job, cluster, {}, "dense").value().predicted_step_ns;
  EXPECT_LT(make_plan(job, cluster, {}, "espresso").value().predicted_step_ns, dense_ns * 3 / 5);
}

// Limits of memory may forbid what is cheapest, so that what is less cheap must be among the candidates.
TEST(MakePlan, IsNoWorseThanTheCastUnderALimitOfMemory) {
  const Job job = equal_tensors(20, 1 << 20);
  const Cluster cluster = two_levels({{"topk(density=0.01)", 229715}, {"cast(bf16)", 229715}});
  PlannerConstraints constraints;
  constraints.max_memory_bytes = 8000000;
  EXPECT_LE(make_plan(job, cluster, constraints).value().predicted_step_ns,
            make_plan(job, cluster, constraints, "bf16").value().predicted_step_ns);
}

// Curves go on beyond their ends, where another codec may be the faster one.
TEST(MakePlan, TakesTheCodecThatIsFasterForATensorBeyondItsCurve) {
  const Job job = equal_tensors(1, 1 << 28);
  const char* const sampled = "topk(density=0.01, select=sampled)";
  Cluster cluster = two_levels({{"topk(density=0.01)", 1000000}, {sampled, 4100000}});
  cluster.levels.erase(cluster.levels.begin());
  for (CodecTimes& times : cluster.codecs) {
    if (times.codec == sampled) times.curve.times_ns.front() = 3600000;
  }
  PlannerConstraints constraints;
  constraints.allowed_codecs = {sampled};
  const Plan plan = make_plan(job, cluster, {}).value(), alone = make_plan(job, cluster, constraints).value();
  EXPECT_LE(plan.predicted_step_ns, alone.predicted_step_ns);
  EXPECT_LE(plan.lower_bound_ns, alone.predicted_step_ns);
}

// Of curves that are flatter at their ends than before, which bounds must not make steeper there.
TEST(MakePlan, BoundsAreBelowPlansWhereCurvesBecomeFlat) {
  for (const auto& [bytes, times_ns] : {std::pair(std::vector<std::int64_t>{4 << 10, 64 << 10, 1 << 20},
                                                  std::vector<std::int64_t>{1'000'000, 20'000'000, 25'000'000}),
                                        std::pair(std::vector<std::int64_t>{1 << 20, 16 << 20, 32 << 20},
                                                  std::vector<std::int64_t>{10'000'000, 170'000'000, 315'000'000})}) {
    Cluster cluster = two_levels({{"cast(bf16)", 120000}});
    cluster.levels.erase(cluster.levels.begin());
    for (auto& [kind, curve] : cluster.levels[0].collectives) curve = {bytes, times_ns};
    const Plan plan = make_plan(equal_tensors(1, 25 << 20), cluster, {}).value();
    EXPECT_LE(plan.lower_bound_ns, plan.predicted_step_ns);
    EXPECT_GE(plan.lower_bound_ns, plan.predicted_step_ns / 2);
  }
}

// Of a tensor thousands of times as large as the largest measured size, where a nanosecond rounded up would be many.
TEST(MakePlan, BoundsAreBelowPlansFarBeyondCurves) {
  Cluster cluster = two_levels({});
  cluster.levels.erase(cluster.levels.begin());
  for (auto& [kind, curve] : cluster.levels[0].collectives) {
    curve = {{4 << 10, 64 << 10, 1 << 20}, {1'000'000, 20'000'000, 20'000'008}};
  }
  for (const std::int64_t elems : {std::int64_t{1} << 28, std::int64_t{1} << 32}) {
    const Plan plan = make_plan(equal_tensors(1, elems), cluster, {}).value();
    EXPECT_LE(plan.lower_bound_ns, plan.predicted_step_ns) << elems;
  }
}

// Where only one size of one collective was measured others are no faster than it.
TEST(MakePlan, WhatWasNotMeasuredIsNotFaster) {
  Cluster cluster = two_levels({});
  cluster.levels.erase(cluster.levels.begin());
  cluster.levels[0].collectives = {{OpKind::kAllReduce, {{1 << 20}, {10'000'000}}}};
  EXPECT_GE(make_plan(equal_tensors(1, 25 << 20), cluster, {}).value().predicted_step_ns, 1'000'000'000);
}

// Pieces are the square of the ranks, and what they take has overflowed.
TEST(MakePlan, ManyRanksMakeNothingFast) {
  for (const auto& [ranks, tensors, codec] :
       {std::tuple(1 << 20, 1, "sign"), std::tuple(1 << 26, 1, "sign"), std::tuple(1 << 30, 1, "sign"),
        std::tuple(1 << 26, 256, "compso(bound=4e-3)")}) {  // whose payloads are preceded by their sizes
    const Job job = equal_tensors(tensors, (25 << 20) / tensors);
    Cluster cluster = two_levels({{codec, 229715}});
    cluster.levels.erase(cluster.levels.begin());
    cluster.levels[0].ranks = ranks;
    const Plan plan = make_plan(job, cluster, {}).value();
    EXPECT_LE(plan.lower_bound_ns, plan.predicted_step_ns) << ranks;
    for (const PlanBucket& bucket : plan.buckets) {
      for (const Operation& operation : bucket.option.operations) {
        EXPECT_FALSE(operation.encoded && (operation.kind == OpKind::kAllGather || operation.kind == OpKind::kGather))
            << ranks << ": " << bucket.option.to_string(plan.topology);
      }
    }
  }
}

// As cortado.profile writes them: without errors, with an rms of 0.
TEST(MakePlan, OfATensorWithoutAGradientNothingIsLost) {
  Job job = equal_tensors(20, 1 << 20);
  for (JobTensor& tensor : job.tensors) {
    tensor.rms = 0.01;
    tensor.errors = {{"cast(bf16)", 0.002}};
  }
  job.tensors[7].rms = 0;
  job.tensors[7].errors.clear();
  const Cluster cluster = two_levels({{"cast(bf16)", 52429}});
  PlannerConstraints constraints;
  constraints.max_total_error = 0.1;
  const Plan limited = make_plan(job, cluster, constraints).value(), plan = make_plan(job, cluster, {}).value();
  EXPECT_EQ(limited.predicted_step_ns, plan.predicted_step_ns);
  for (const std::string& note : limited.notes) EXPECT_EQ(note.find("no measured error"), std::string::npos) << note;
  EXPECT_NEAR(expected_error(limited, job).value(), 0.002, 1e-9);
}

// The first tensor has most of the gradient, and loses most of itself: fused with another one, too.
TEST(MakePlan, ALimitOfTheTotalErrorIsOfTheNormOfAllTensors) {
  Job job = equal_tensors(20, 1 << 20);
  for (JobTensor& tensor : job.tensors) {
    const bool is_first = &tensor == job.tensors.data();
    tensor.rms = is_first ? 10 : 1;
    tensor.errors = {{"topk(density=0.01)", is_first ? 0.9 : 0.1}};
  }
  PlannerConstraints constraints;
  constraints.max_total_error = 0.6;
  const Plan plan = make_plan(job, two_levels({{"topk(density=0.01)", 229715}}), constraints).value();
  EXPECT_LE(expected_error(plan, job).value(), 0.6);
  EXPECT_GT(expected_error(plan, job).value(), 0);
}

TEST(MakePlan, DeclinesWhereNothingIsToBeGained) {
  Job job = job_named("resnet101");
  const Plan plan = make_plan(job, cluster_named("nvlink_100g"), {}).value();
  for (const PlanBucket& bucket : plan.buckets) EXPECT_EQ(bucket.option.encodes(), 0);
  EXPECT_NE(plan.notes.end(), std::find_if(plan.notes.begin(), plan.notes.end(), [](const std::string& note) {
              return note.find("nothing is encoded") != std::string::npos;
            }));
}

TEST(MakePlan, SaysWhatIsWrong) {
  const LemmaOne example;
  Job job = example.job;
  job.tensors[1].ready_ns = 5;
  EXPECT_NE(make_plan(job, example.cluster, {}).status().message().find("job: $.tensors[1].ready_ns"),
            std::string::npos);
  EXPECT_NE(make_plan(example.job, example.cluster, {}, "clever").status().message().find("myopic"), std::string::npos);
  EXPECT_EQ(make_plan(example.job, example.cluster, {}, "bf16").status().code(), StatusCode::kUnsupported);
}

TEST(SimulatePlan, RefusesPlansOfOtherJobsAndClusters) {
  const LemmaOne example;
  const Plan plan = make_plan(example.job, example.cluster, {}).value();
  const auto error = [](const Plan& plan, const Job& job, const Cluster& cluster) {
    return simulate_plan(plan, job, cluster).status().message();
  };
  Job job = example.job;
  job.tensors[0].name = "other";
  EXPECT_NE(
      error(plan, job, example.cluster).find("$.buckets[0].tensors[0]: expected a tensor of job \"two\", got \"t0\""),
      std::string::npos);
  job = example.job;
  job.tensors[0].shape = {7};
  EXPECT_NE(error(plan, job, example.cluster).find("$.buckets[0].elems[0]: expected the 7 elements of \"t0\""),
            std::string::npos);
  job = example.job;
  job.tensors.push_back(job.tensors[1]);
  job.tensors[2].name = "t2";
  EXPECT_NE(error(plan, job, example.cluster).find("\"t2\" is missing"), std::string::npos);
  Cluster cluster = example.cluster;
  cluster.levels[0].ranks = 4;
  EXPECT_NE(error(plan, example.job, cluster).find("$.levels"), std::string::npos);
  cluster = example.cluster;
  cluster.codecs.clear();
  EXPECT_NE(error(plan, example.job, cluster).find("$.buckets[0].codec"), std::string::npos);
}

// Found in review, the first one as a write beyond an array.
TEST(SimulatePlan, SaysWhatItCanNotSimulate) {
  LemmaOne example;
  const Plan plan = plan_of_tensors(example, "all_reduce@all", "none");
  Cluster deep = example.cluster;
  for (int l = 0; l < 4; ++l) {
    deep.levels.push_back(deep.levels[0]);
    deep.levels.back().name += std::to_string(l);
  }
  EXPECT_EQ(simulate_plan(plan, example.job, deep).status().to_string(),
            "unsupported: cluster: $.levels: expected at most 4 levels, got 5");

  Plan fused = plan;
  fused.buckets.pop_back();
  fused.buckets[0].tensors = {"t0", "t1"};
  ASSERT_TRUE(simulate_plan(fused, example.job, example.cluster).ok());
  Job mixed = example.job;
  mixed.tensors[1].dtype = DType::kBFloat16;
  EXPECT_EQ(simulate_plan(fused, mixed, example.cluster).status().to_string(),
            "unsupported: plan: $.buckets[0]: expected tensors of one dtype in job \"two\", as plans for it have");

  example.cluster.levels.push_back(example.cluster.levels[0]);
  example.cluster.levels[1].name = "outer";
  for (CodecTimes& times : example.cluster.codecs) times.codec = "power(rank=4)";
  for (JobTensor& tensor : example.job.tensors) tensor.shape = {10, 100};
  const auto in_parts = [&](const std::string& device) {
    const std::string option =
        "reduce_scatter@all encode@" + device + " all_gather@outer decode@" + device + " all_gather@all";
    return simulate_plan(plan_of_tensors(example, option.c_str(), "power(rank=4)"), example.job, example.cluster)
        .status()
        .message();
  };
  EXPECT_EQ(in_parts("cpu"), "plan: $.buckets[0].option: \"power(rank=4)\" is of low rank, and not coded in parts");
  std::erase_if(example.cluster.codecs, [](const CodecTimes& times) { return times.device == OpDevice::kCpu; });
  EXPECT_NE(in_parts("cpu").find("has no times of \"power(rank=4)\" on a device it uses"), std::string::npos);
}

TEST(Timeline, AsText) {
  const LemmaOne example;
  Plan plan;
  plan.topology = example.cluster.topology();
  for (const char* option : {"encode@gpu all_gather@all decode@gpu", "encode@cpu all_gather@all decode@cpu"}) {
    PlanBucket bucket;
    bucket.tensors = {"t" + std::to_string(plan.buckets.size())};
    bucket.codec = "sign(scale=mean_abs)";
    bucket.option = Option::parse(option, plan.topology).value();
    plan.buckets.push_back(bucket);
  }
  const Timeline timeline = simulate_plan(plan, example.job, example.cluster).value();
  EXPECT_EQ(timeline_to_text(timeline, plan, 111),
            "step 11.100 ms, one column 0.100 ms\n"
            "compute    19 % "
            "=====================....................................................................................."
            ".....\n"
            "gpu codec   1 % "
            "..........a..............................................................................................."
            ".....\n"
            "cpu codec  14 % "
            ".....................bbbbbbbbbbbbbbb......................................................................"
            ".....\n"
            "all        90 % "
            "..........."
            "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaabbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb\n"
            "a 1 tensor, t0: sign(scale=mean_abs) encode@gpu all_gather@all decode@gpu\n"
            "b 1 tensor, t1: sign(scale=mean_abs) encode@cpu all_gather@all decode@cpu\n");
  const std::string trace = timeline_to_trace(timeline, plan);
  EXPECT_NE(trace.find(R"({"name":"all_gather bucket 1","ph":"X","pid":0,"tid":5,"ts":6100.0,"dur":5000.0)"),
            std::string::npos)
      << trace;
}

TEST(ExplainPlan, SaysWhatEveryBucketGainsAndWhatElseThereWas) {
  const Job job = job_named("lstm");
  const Cluster cluster = cluster_named("pcie_25g");
  const Plan plan = make_plan(job, cluster, {}).value();
  const Result<Explanation> explained = explain_plan(plan, job, cluster, {});
  ASSERT_TRUE(explained.ok()) << explained.status().to_string();
  EXPECT_EQ(explained.value().step_ns, plan.predicted_step_ns);
  ASSERT_EQ(explained.value().buckets.size(), plan.buckets.size());
  std::int64_t free_ns = 0;
  for (const auto& [name, step_ns] : explained.value().totals) {
    if (name == "free compression") {
      free_ns = step_ns;
    } else if (name != "lower bound") {
      EXPECT_GE(step_ns, plan.predicted_step_ns) << name;
    }
  }
  EXPECT_LE(free_ns, plan.predicted_step_ns);
  EXPECT_GT(free_ns, 0);
  bool gains = false;
  for (const ExplainedBucket& bucket : explained.value().buckets) {
    gains |= bucket.gain_ns > 0;
    ASSERT_FALSE(bucket.others.empty());
    for (const ExplainedWay& way : bucket.others) EXPECT_FALSE(way.reason.empty());
  }
  EXPECT_TRUE(gains);
  const std::string text = explanation_to_text(explained.value(), plan);
  for (const char* part : {"espresso", "free compression", "runner-up", "rejected", "encoder.weight"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part;
  }
}

// Found in review: what the strategy used was looked for among what is allowed.
TEST(ExplainPlan, ExplainsTheCastThatIsCompared) {
  const Job job = job_named("lstm");
  const Cluster cluster = cluster_named("pcie_25g");
  const PlannerConstraints no_cast = {.allowed_codecs = {"topk(density=0.01)"}};
  const Plan plan = make_plan(job, cluster, no_cast, "bf16").value();
  const Result<Explanation> explained = explain_plan(plan, job, cluster, no_cast);
  ASSERT_TRUE(explained.ok()) << explained.status().to_string();
  EXPECT_EQ(explained.value().step_ns, plan.predicted_step_ns);

  LemmaOne example;
  example.cluster.codecs.clear();
  for (const char* cast : {"cast(fp16)", "cast(bf16)"}) {  // the second is never faster
    for (const OpKind direction : {OpKind::kEncode, OpKind::kDecode}) {
      example.cluster.codecs.push_back({cast, OpDevice::kGpu, direction, 1, {{1, 1000}, {10, 10}}, {}});
    }
  }
  const Plan of_cast = make_plan(example.job, example.cluster, {}, "bf16").value();
  const Result<Explanation> of_slower = explain_plan(of_cast, example.job, example.cluster, {});
  ASSERT_TRUE(of_slower.ok()) << of_slower.status().to_string();
}

// The comparator looked for the text "cast(bf16)", and each direction was a codec of its own if spelt differently.
TEST(MakePlan, SpellingsInTheClusterFileAreOneCodec) {
  LemmaOne example;
  std::vector<std::int64_t> steps_ns;
  for (const auto& [encode, decode] :
       {std::pair("cast(bf16)", "cast(bf16)"), std::pair("cast", "cast( dtype=bf16 )")}) {
    example.cluster.codecs.clear();
    example.cluster.codecs.push_back({encode, OpDevice::kGpu, OpKind::kEncode, 1, {{1, 1000}, {10, 10}}, {}});
    example.cluster.codecs.push_back({decode, OpDevice::kGpu, OpKind::kDecode, 1, {{1, 1000}, {10, 10}}, {}});
    const PlannerConstraints none = {.allowed_codecs = {"none"}};
    const Plan plan = make_plan(example.job, example.cluster, none, "bf16").value();
    EXPECT_EQ(plan.notes.front().find("stands for it"), std::string::npos) << plan.notes.front();
    EXPECT_TRUE(explain_plan(plan, example.job, example.cluster, none).ok());
    steps_ns.push_back(plan.predicted_step_ns);
  }
  EXPECT_EQ(steps_ns[0], steps_ns[1]);
  EXPECT_LT(steps_ns[1], make_plan(example.job, example.cluster, {}, "dense").value().predicted_step_ns);
}

// A name could clear the screen, or do worse.
TEST(ExplainPlan, TextsHaveNoControlCharacters) {
  Job job = job_named("lstm");
  for (JobTensor& tensor : job.tensors) tensor.name += "\x1b[2J\n";
  Cluster cluster = cluster_named("pcie_25g");
  Plan plan = make_plan(job, cluster, {}).value();
  plan.notes.push_back("of \x1b]0;title\x07");
  Timeline timeline = simulate_plan(plan, job, cluster).value();
  timeline.rows[0] += "\x1b[2J";
  const std::string texts[] = {timeline_to_text(timeline, plan),
                               explanation_to_text(explain_plan(plan, job, cluster, {}).value(), plan)};
  for (const std::string& text : texts) {
    EXPECT_EQ(text.find_first_of("\x1b\x07"), std::string::npos) << text;
    EXPECT_NE(text.find("?[2J"), std::string::npos) << text;
  }
  EXPECT_NE(texts[1].find("  " + printable(job.tensors[0].name) + "\n"), std::string::npos) << texts[1];
}

// Cluster, job, plan and constraints may each spell it their own way.
TEST(MakePlan, SpellingsOfACodecAreOne) {
  Job job = job_named("lstm");
  const Cluster cluster = cluster_named("pcie_25g");
  const std::string spelt = canonical_codec("topk(density=0.01)");
  ASSERT_NE(spelt, "topk(density=0.01)");
  for (JobTensor& tensor : job.tensors) tensor.errors = {{spelt, 0.5}};
  const PlannerConstraints constraints = {.allowed_codecs = {"topk"}, .max_tensor_error = 0.6};
  Plan plan = make_plan(job, cluster, constraints).value();
  int encoded = 0;
  for (PlanBucket& bucket : plan.buckets) {
    if (bucket.option.encodes() == 0) continue;
    bucket.codec = spelt;
    ++encoded;
  }
  EXPECT_GT(encoded, 0);
  EXPECT_EQ(simulate_plan(plan, job, cluster).value().step_ns, plan.predicted_step_ns);
  EXPECT_TRUE(explain_plan(plan, job, cluster, constraints).ok());
  EXPECT_GT(expected_error(plan, job).value(), 0);
}

// Though another one that is allowed now is never slower.
TEST(ExplainPlan, ExplainsAPlanOfAnyCodecWithTimes) {
  const Job job = job_named("lstm");
  const Cluster cluster = cluster_named("pcie_25g");
  for (const char* codec : {"topk(density=0.01)", "sign(scale=mean_abs)", "cast(fp16)"}) {
    const Plan plan = make_plan(job, cluster, {.allowed_codecs = {codec}}).value();
    const Result<Explanation> explained = explain_plan(plan, job, cluster, {});
    ASSERT_TRUE(explained.ok()) << codec << ": " << explained.status().to_string();
    EXPECT_EQ(explained.value().step_ns, plan.predicted_step_ns);
  }
}

// Which is a search, too, but finds nothing longer than the plan takes there.
TEST(ExplainPlan, FreeCompressionIsNeverSlower) {
  const Cluster cluster = cluster_named("pcie_25g");
  for (const char* name : {"resnet101", "lstm"}) {
    const Job job = job_named(name);
    const Plan plan = make_plan(job, cluster, {.allowed_codecs = {"cast(fp16)"}}).value();
    const Explanation explained = explain_plan(plan, job, cluster, {.allowed_codecs = {"cast(fp16)"}}).value();
    const auto free = std::find_if(explained.totals.begin(), explained.totals.end(),
                                   [](const auto& total) { return total.first == "free compression"; });
    ASSERT_NE(free, explained.totals.end());
    EXPECT_LE(free->second, plan.predicted_step_ns) << name;
  }
}

// The comparator is searched for, too, but for less time.
TEST(ExplainPlan, DenseIsNoSlowerThanAPlanThatDoesNotEncode) {
  const Job job = job_named("resnet101");
  const Cluster cluster = cluster_named("pcie_25g");
  const PlannerConstraints constraints = {.allowed_codecs = {"randk(density=0.01)"}};
  const Plan plan = make_plan(job, cluster, constraints).value();
  ASSERT_LT(plan.predicted_step_ns, make_plan(job, cluster, constraints, "dense").value().predicted_step_ns);
  for (const PlanBucket& bucket : plan.buckets) ASSERT_EQ(bucket.option.encodes(), 0);
  const Explanation explained = explain_plan(plan, job, cluster, constraints).value();
  const auto dense = std::find_if(explained.totals.begin(), explained.totals.end(),
                                  [](const auto& total) { return total.first == "dense"; });
  ASSERT_NE(dense, explained.totals.end());
  EXPECT_EQ(dense->second, plan.predicted_step_ns);
  const std::string page = report_to_html(plan, job, cluster, explained).value();
  EXPECT_NE(page.find(R"(["faster than dense","1.00x"])"), std::string::npos);
}

TEST(ExplainPlan, RefusesAPlanThatBreaksALimit) {
  const Job job = job_named("lstm");
  const Cluster cluster = cluster_named("pcie_25g");
  const Plan plan = make_plan(job, cluster, {}).value();
  const Status status = explain_plan(plan, job, cluster, {.max_memory_bytes = 1}).status();
  EXPECT_EQ(status.code(), StatusCode::kMismatch);
  EXPECT_NE(status.message().find("breaks a limit"), std::string::npos) << status.message();
}

TEST(ExpectedError, IsThatOfTheJobWeightedByNorm) {
  Job job;
  const auto add = [&](const char* name, std::vector<std::int64_t> shape, std::optional<double> rms, double error) {
    JobTensor& tensor = job.tensors.emplace_back();
    tensor.name = name, tensor.shape = std::move(shape), tensor.rms = rms;
    tensor.errors = {{"sign(scale=mean_abs)", error}};
  };
  add("small", {4}, 3.0, 0.5);
  add("large", {4, 16}, 1.0, 0.25);
  add("last", {2}, {}, 0.1);
  const Topology topology = {{{"all", 4}}};
  Plan plan;
  plan.topology = topology;
  const char* const options[] = {"encode@cpu all_gather@all decode@cpu",
                                 "encode@cpu all_to_all@all decode@cpu encode@cpu all_gather@all decode@cpu",
                                 "all_reduce@all"};
  for (std::size_t b = 0; b < 3; ++b) {
    PlanBucket& bucket = plan.buckets.emplace_back();
    bucket.tensors = {job.tensors[b].name};
    bucket.option = Option::parse(options[b], topology).value();
    bucket.codec = b < 2 ? "sign(scale=mean_abs)" : "none";
  }
  EXPECT_DOUBLE_EQ(expected_error(plan, job, 0).value(), 0.5);
  EXPECT_DOUBLE_EQ(expected_error(plan, job, 1).value(), 0.5);  // twice 0.25
  EXPECT_DOUBLE_EQ(expected_error(plan, job, 2).value(), 0);
  // What the last one weighs against the others is not known.
  EXPECT_FALSE(expected_error(plan, job).has_value());
  job.tensors[2].rms = 2.0;
  EXPECT_DOUBLE_EQ(expected_error(plan, job).value(), std::sqrt((36 * 0.25 + 64 * 0.25) / (36 + 64 + 8)));
  Plan mixed = plan;
  mixed.buckets[1].tensors.push_back("last");
  mixed.buckets.pop_back();
  EXPECT_TRUE(expected_error(mixed, job, 1).has_value());
  job.tensors[2].rms.reset();
  EXPECT_FALSE(expected_error(mixed, job, 1).has_value());
  EXPECT_DOUBLE_EQ(expected_error(mixed, job, 0).value(), 0.5);
  job.tensors[2].shape = {0};
  EXPECT_TRUE(expected_error(mixed, job, 1).has_value()) << "weighs nothing, however large its values";
  job.tensors[2].shape = {2};
  plan.buckets[0].codec = "float_rans";
  EXPECT_DOUBLE_EQ(expected_error(plan, job, 0).value(), 0);
  plan.buckets[0].codec = "quant(bits=4)";
  EXPECT_FALSE(expected_error(plan, job, 0).has_value());
  EXPECT_FALSE(expected_error(plan, job).has_value());
}

// What a limit forbids is told with the time that it would take, and is no runner-up.
TEST(ExplainPlan, SaysWhatIsOverALimit) {
  const Job job = job_named("lstm");
  const Cluster cluster = cluster_named("pcie_25g");
  const Plan free_plan = make_plan(job, cluster, {}).value();
  PlannerConstraints constraints;
  constraints.max_memory_bytes = 0;
  const Plan plan = make_plan(job, cluster, constraints).value();
  ASSERT_GT(plan.predicted_step_ns, free_plan.predicted_step_ns);
  const Explanation explained = explain_plan(plan, job, cluster, constraints).value();
  int over_limit = 0;
  for (const ExplainedBucket& bucket : explained.buckets) {
    bool was_allowed = true;
    for (const ExplainedWay& way : bucket.others) {
      EXPECT_LT(way.step_ns, 100 * plan.dense_step_ns) << way.reason;
      EXPECT_TRUE(was_allowed || !way.is_allowed) << "those that are allowed come first";
      was_allowed = way.is_allowed;
      const bool says_so = way.reason.find("over a limit") != std::string::npos;
      EXPECT_EQ(says_so, !way.is_allowed && way.step_ns >= 0) << way.reason;
      over_limit += says_so;
    }
  }
  EXPECT_GT(over_limit, 0);
  const std::string text = explanation_to_text(explained, plan);
  EXPECT_NE(text.find(" ms shorter, over a limit"), std::string::npos) << text;
}

}  // namespace
}  // namespace cortado
