// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "session/candidates.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>

#include "collective/rank_threads.h"
#include "core/check.h"
#include "cortado/codec.h"
#include "cortado/engine.h"
#include "cortado/planner.h"
#include "planner/cost/option_cost.h"
#include "session/cluster_testing.h"

namespace cortado {
namespace {

const std::vector<EngineTensor> kTensors = {{.name = "first.weight", .rows = 400, .cols = 900},
                                            {.name = "last.weight", .rows = 300, .cols = 1500}};

Candidates find(Quality quality, const std::optional<Cluster>& cluster, std::int64_t last_ready_ns = 100'000'000,
                bool keeps_gradients = false, const std::vector<EngineTensor>& tensors = kTensors,
                const Topology& topology = Topology::two_levels(4, 2).value()) {
  const AutoOptions options{.quality = quality, .cluster = {}, .measure_s = 0, .transport_version = {}};
  const MeasuredSteps steps{.ready_ns = {200'000'000, last_ready_ns},
                            .dense_ns = 500'000'000,
                            .keeps_gradients = keeps_gradients,
                            .samples = {}};
  std::vector<Candidates> found(4);
  const std::vector<Status> statuses = run_ranks(4, [&](Communicator& communicator) -> Status {
    const CandidateRequest request{tensors, options, topology, cluster, {}};
    Result<Candidates> own = find_candidates(request, steps, &communicator, steady_clock());
    if (own.ok()) found[static_cast<std::size_t>(communicator.rank())] = std::move(own).value();
    return own.status();
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  for (const Candidates& candidates : found) EXPECT_EQ(candidates_to_json(candidates), candidates_to_json(found[0]));
  return found[0];
}

std::vector<std::string> labels(const Candidates& candidates) {
  std::vector<std::string> labels;
  for (const AutoCandidate& candidate : candidates.list) {
    labels.push_back(candidate.label.starts_with("plan(") ? "plan" : candidate.label);
  }
  return labels;
}

bool has(const std::vector<std::string>& labels, const std::string& label) {
  return std::find(labels.begin(), labels.end(), label) != labels.end();
}

// Of sums of factors: the planner counts what the engine sends.
TEST(Candidates, LowRankIsPricedByTheBytesThatEnginesSend) {
  const std::vector<EngineTensor> tensors = {{.name = "conv", .rows = 64, .cols = 576, .dimensions = 4},
                                             {.name = "bias", .rows = 1, .cols = 768, .dimensions = 1},
                                             {.name = "wide", .rows = 300, .cols = 7},
                                             {.name = "small", .rows = 4, .cols = 4}};
  std::vector<JobTensor> of_job;
  for (const EngineTensor& tensor : tensors) {
    JobTensor& added = of_job.emplace_back();
    added.name = tensor.name;
    added.shape = tensor.dimensions < 2 ? std::vector<std::int64_t>{tensor.cols}
                                        : std::vector<std::int64_t>{tensor.rows, tensor.cols};
  }
  for (const char* codec : {"acp(rank=4)", "acp(rank=3)", "power(rank=4)"}) {
    SCOPED_TRACE(codec);
    const Topology topology = {{{"all", 2}}};
    Plan plan{.job = "", .cluster = "", .topology = topology, .buckets = {}, .notes = {}, .unknown = {}};
    PlanBucket& bucket = plan.buckets.emplace_back();
    for (const EngineTensor& tensor : tensors) bucket.tensors.push_back(tensor.name);
    bucket.codec = codec;
    bucket.option = Option::parse("encode@cpu all_reduce@all decode@cpu", topology).value();
    std::int64_t sent_bytes = 0;
    const std::vector<Status> statuses = run_ranks(2, [&](Communicator& communicator) -> Status {
      CORTADO_ASSIGN_OR_RETURN(const auto engine, Engine::create(tensors, plan, {}, &communicator));
      CORTADO_RETURN_IF_ERROR(engine->begin_step({}));
      std::vector<std::vector<float>> gradients;
      for (std::uint32_t t = 0; t < tensors.size(); ++t) {
        std::vector<float>& gradient =
            gradients.emplace_back(static_cast<std::size_t>(tensors[t].rows * tensors[t].cols), 1.0f);
        const Gradient submitted{t, gradient.data()};
        CORTADO_RETURN_IF_ERROR(engine->submit({&submitted, 1}));
      }
      CORTADO_RETURN_IF_ERROR(engine->finish_step().status());
      if (communicator.rank() == 0) sent_bytes = engine->report().payload_bytes;
      return {};
    });
    for (const Status& status : statuses) ASSERT_TRUE(status.ok()) << status.to_string();
    Cluster cluster = two_machines(500, {codec});
    std::vector<std::string> notes;
    const std::vector<CodecCost> costs = codec_costs(cluster, OpDevice::kCpu, {codec}, &notes).value();
    ASSERT_EQ(costs.size(), 1u);
    TensorSums sums(costs, of_job);
    EXPECT_EQ(sums.factor_bytes(costs[0], 0, static_cast<int>(of_job.size()) - 1), sent_bytes);
  }
}

TEST(Candidates, AreThoseWithTheBestPredictions) {
  const Candidates found = find(Quality::kAggressive, two_machines(500, auto_codecs(Quality::kAggressive)));
  EXPECT_TRUE(found.notes.empty()) << found.notes[0];
  ASSERT_EQ(found.list.size(), static_cast<std::size_t>(kMostTried) + 1);
  EXPECT_EQ(found.list[0].label, "dense");
  for (std::size_t c = 1; c < found.list.size(); ++c) {
    EXPECT_GE(found.list[c].predicted_ns, 0);
    EXPECT_LT(found.list[c].predicted_ns, found.list[0].predicted_ns);
    EXPECT_TRUE(c == 1 || found.list[c].predicted_ns >= found.list[c - 1].predicted_ns);
  }
  EXPECT_TRUE(has(labels(found), "topk(density=0.01)"));
  EXPECT_FALSE(has(labels(found), "cast(bf16)"));  // not among the best five
}

// A cluster file may lack some codecs. What can't be predicted comes after what can, and users are told.
TEST(Candidates, ThoseWithoutPredictionComeLast) {
  std::vector<std::string> known = auto_codecs(Quality::kAggressive);
  std::erase_if(known,
                [](const std::string& codec) { return codec.starts_with("cast") || codec.starts_with("compso"); });
  const Candidates found = find(Quality::kAggressive, two_machines(500, known));
  ASSERT_EQ(found.list.size(), static_cast<std::size_t>(kMostTried) + 1);
  for (const AutoCandidate& candidate : found.list) EXPECT_GE(candidate.predicted_ns, 0) << candidate.label;
  EXPECT_TRUE(has(labels(found), "topk(density=0.01)"));
  ASSERT_EQ(found.notes.size(), 3u);
  EXPECT_NE(found.notes[0].find("no prediction of cast(bf16)"), std::string::npos) << found.notes[0];
  EXPECT_NE(found.notes[0].find("has times of"), std::string::npos) << found.notes[0];

  // Where there is room they are tried all the same.
  const Candidates safe = find(Quality::kSafe, two_machines(500, {"cast(fp16)"}));
  ASSERT_GE(safe.list.size(), 3u);
  EXPECT_EQ(safe.list.back().label, "cast(bf16)");
  EXPECT_EQ(safe.list.back().predicted_ns, -1);
}

// A cast sends the first MiB when it is there, as the engine does.
TEST(Candidates, WhatIsReadyEarlyIsPredictedToLeaveEarly) {
  const auto predicted = [](std::int64_t last_ready_ns) {
    const Candidates found = find(Quality::kSafe, two_machines(10, {"cast(bf16)"}), last_ready_ns);
    for (const AutoCandidate& candidate : found.list) {
      if (candidate.label == "cast(bf16)") return candidate.predicted_ns;
    }
    return std::int64_t{-1};
  };
  EXPECT_GT(predicted(200'000'000), predicted(100'000'000));
  EXPECT_GT(predicted(100'000'000), 200'000'000);
}

std::int64_t predicted(const Candidates& of, const std::string& start) {
  for (const AutoCandidate& candidate : of.list) {
    if (candidate.label.starts_with(start)) return candidate.predicted_ns;
  }
  return -1;
}

// Error feedback can undo a step only as long as there are gradients; of gathered payloads the engine keeps what it
// needs while it waits for others.
TEST(Candidates, FactorsAreDecodedAfterTheVerdictWhereGradientsAreNotKept) {
  // Both leave at the end, in messages of their own: while one travels the other could be decoded.
  const std::vector<EngineTensor> large = {{.name = "first.weight", .rows = 8000, .cols = 8000},
                                           {.name = "last.weight", .rows = 8000, .cols = 8000}};
  for (const std::int64_t decode_ns : {10'000'000, 300'000'000}) {  // sooner than the other travels, and later
    Cluster cluster = two_machines(500, auto_codecs(Quality::kAggressive));
    for (CodecTimes& times : cluster.codecs) {
      if (times.direction == OpKind::kDecode) times.curve.times_ns = {decode_ns / 1000, decode_ns};
    }
    const Candidates waits = find(Quality::kAggressive, cluster, 199'000'000, false, large),
                     early = find(Quality::kAggressive, cluster, 199'000'000, true, large);
    ASSERT_GT(predicted(early, "acp(rank=4)"), 0);
    EXPECT_GT(predicted(waits, "acp(rank=4)"), predicted(early, "acp(rank=4)"));
    ASSERT_GT(predicted(early, "topk(density=0.01)"), 0);
    EXPECT_EQ(predicted(waits, "topk(density=0.01)"), predicted(early, "topk(density=0.01)"));
    EXPECT_EQ(predicted(waits, "dense"), predicted(early, "dense"));
  }
}

// Factors are made in float32, whatever they travel in.
TEST(Candidates, LowRankOnANarrowWireIsEncodedWholeAndSentInHalf) {
  const std::string narrow = "acp(rank=16, wire=bf16)";
  Cluster cluster = two_machines(500, auto_codecs(Quality::kAggressive));
  const Candidates before = find(Quality::kAggressive, cluster);
  ASSERT_GT(predicted(before, narrow), 0);
  EXPECT_GT(predicted(before, narrow), predicted(before, "acp(rank=4)")) << "half of rank 16 is twice rank 4";

  for (ClusterLevel& level : cluster.levels) level.bfloat16_sum_factor = 1.1;
  const Candidates slow_sums = find(Quality::kAggressive, cluster);
  EXPECT_GT(predicted(slow_sums, narrow), predicted(before, narrow));
  EXPECT_EQ(predicted(slow_sums, "acp(rank=4)"), predicted(before, "acp(rank=4)"));

  constexpr std::int64_t kLonger = 10'000'000;
  for (CodecTimes& times : cluster.codecs) {
    if (times.codec != "acp(rank=16)" || times.direction != OpKind::kEncode) continue;
    for (std::int64_t& time_ns : times.curve.times_ns) time_ns += kLonger;
  }
  const Candidates slow_codec = find(Quality::kAggressive, cluster);
  EXPECT_GE(predicted(slow_codec, narrow), predicted(slow_sums, narrow) + kLonger / 2);
}

TEST(Candidates, SettingsArePredictedWithTheMessagesOfTheirEngines) {
  const auto predicted_at = [](Quality quality, const std::string& setting, std::int64_t last_ready_ns) {
    const std::int64_t step_ns =
        predicted(find(quality, two_machines(500, auto_codecs(quality)), last_ready_ns), setting);
    EXPECT_GT(step_ns, 0) << setting;
    return step_ns;
  };
  // Factors are so small that they make one message, which leaves when all is there.
  EXPECT_EQ(predicted_at(Quality::kAggressive, "acp(rank=4)", 100'000'000),
            predicted_at(Quality::kAggressive, "acp(rank=4)", 190'000'000));
  EXPECT_LT(predicted_at(Quality::kBalanced, "quant(bits=4", 100'000'000),
            predicted_at(Quality::kBalanced, "quant(bits=4", 190'000'000));
}

Plan plan_among(const Candidates& candidates) {
  for (const AutoCandidate& candidate : candidates.list) {
    if (candidate.plan.has_value()) return *candidate.plan;
  }
  ADD_FAILURE() << "there is no plan";
  return {};
}

TEST(Candidates, AreReadFromWhatTheyAre) {
  const Candidates found = find(Quality::kSafe, two_machines(500, {"cast(bf16)"}));
  for (const AutoCandidate& candidate : found.list) {
    EXPECT_EQ(candidate.plan.has_value(), candidate.label.starts_with("plan(")) << candidate.label;
    EXPECT_EQ(candidate_of(candidate.what).value().label, candidate.label);
    EXPECT_FALSE(candidate.plan.has_value() && has_varying_payloads(candidate)) << candidate.label;
  }
  EXPECT_FALSE(plan_among(found).buckets.empty());
  EXPECT_EQ(candidate_of("none").value().label, "dense");
  EXPECT_EQ(candidate_of("{}").status().message(), plan_from_json("{}").status().message());
}

// As DDP hands gradients over, and engines encode them.
TEST(Candidates, PlansBeginWithWhatWasRegisteredLast) {
  const Plan plan = plan_among(find(Quality::kSafe, two_machines(500, {"cast(bf16)"}), 200'000'000));
  ASSERT_FALSE(plan.buckets.empty());
  EXPECT_EQ(plan.buckets.front().tensors.front(), "last.weight");
}

// On one level the engine of a setting sends these with fewer messages than a plan's could.
TEST(Candidates, PlansOnOneLevelHaveNoPayloadsWhoseSizesVary) {
  const Topology topology = Topology::two_levels(4, 1).value();
  Cluster cluster = two_machines(500, {"topk(density=0.01)", "compso(bound=4e-3)",
                                       "quant(error=0.3, round=dead_zone, coder=rans)", "sign(scale=mean_abs)"});
  cluster.levels = {cluster.levels.back()};
  cluster.levels[0].name = topology.levels[0].name;
  cluster.levels[0].ranks = 4;
  const Plan plan = plan_among(find(Quality::kAggressive, cluster, 100'000'000, false, kTensors, topology));
  int encoded = 0;
  for (const PlanBucket& bucket : plan.buckets) {
    if (bucket.option.encodes() == 0) continue;
    ++encoded;
    EXPECT_TRUE(make_codec(bucket.codec).value()->row().traits.fixed_size) << bucket.codec;
  }
  EXPECT_GT(encoded, 0);
}

// Gradients are cast where they lie, also by plans.
TEST(Candidates, DenseStepsPackGradientsAndCastsDoNot) {
  Cluster cluster = two_machines(500, {"cast(bf16)"});
  const Candidates without = find(Quality::kSafe, cluster);
  cluster.pack = cluster.unpack = {.sizes = {1000, 1'000'000}, .times_ns = {20'000, 20'000'000}};
  const Candidates with = find(Quality::kSafe, cluster);
  EXPECT_EQ(predicted(with, "cast(bf16)"), predicted(without, "cast(bf16)"));
  EXPECT_GT(predicted(with, "dense"), predicted(without, "dense")) << "buffers are scaled";

  // The plan is of ways that pack nothing.
  for (std::int64_t& time_ns : cluster.pack.times_ns) time_ns *= 2;
  const Candidates longer = find(Quality::kSafe, cluster);
  ASSERT_GT(predicted(with, "plan("), 0);
  EXPECT_EQ(predicted(longer, "plan("), predicted(with, "plan("));
  for (const PlanBucket& bucket : plan_among(with).buckets) {
    EXPECT_EQ(bucket.option.operations.front().kind, OpKind::kEncode);
    EXPECT_EQ(bucket.option.operations.back().kind, OpKind::kDecode);
  }
}

// What a setting's engine decodes is what all ranks have sent, and nothing before.
TEST(Candidates, SettingsDecodeNothingWhileTheyEncode) {
  const std::string setting = "topk(density=0.01)";
  Cluster cluster = two_machines(500, auto_codecs(Quality::kAggressive));
  const Candidates before = find(Quality::kAggressive, cluster);
  ASSERT_GT(predicted(before, setting), 0);
  constexpr std::int64_t kLongerNs = 10'000'000;  // encodes of calibration decode what they have made
  const std::vector<CodecTimes> as_before = cluster.codecs;
  for (CodecTimes& times : cluster.codecs) {
    for (std::int64_t& time_ns : times.curve.times_ns) time_ns += kLongerNs;
  }
  constexpr std::int64_t kPayloads = 2 * 4;  // of two tensors, from four ranks
  const std::int64_t expected_ns = predicted(before, setting) + kPayloads * kLongerNs;
  EXPECT_EQ(predicted(find(Quality::kAggressive, cluster), setting), expected_ns);

  // Times with another number of threads say nothing.
  for (CodecTimes& times : cluster.codecs) times.threads = cluster.cpu_codec_threads = 4;
  cluster.codecs.insert(cluster.codecs.begin(), as_before.begin(), as_before.end());
  EXPECT_EQ(predicted(find(Quality::kAggressive, cluster), setting), expected_ns);
}

// Two curves that were measured apart: what decoding takes may rise where encoding does not.
TEST(Candidates, PredictsWhereDecodingRisesFasterThanEncoding) {
  const std::string setting = "topk(density=0.01)";
  Cluster cluster = two_machines(500, auto_codecs(Quality::kAggressive));
  for (CodecTimes& times : cluster.codecs) {
    if (times.codec != setting) continue;
    times.curve.times_ns = {1000, 800'000};
    if (times.direction == OpKind::kEncode) times.curve.times_ns = {1'000'000, 1'000'000};
  }
  const Candidates found = find(Quality::kAggressive, cluster);
  EXPECT_TRUE(found.notes.empty()) << found.notes[0];
  EXPECT_GT(predicted(found, setting), 0);
}

TEST(Candidates, TensorsWithoutElementsDelayNothing) {
  const std::string setting = "acp(rank=4)";
  const Cluster cluster = two_machines(500, auto_codecs(Quality::kAggressive));
  std::vector<EngineTensor> tensors = kTensors;
  tensors.push_back({.name = "empty", .rows = 0, .cols = 10});
  AutoOptions options{.quality = Quality::kAggressive, .cluster = {}, .measure_s = 0, .transport_version = {}};
  MeasuredSteps steps{.ready_ns = {2'000'000, 1'000'000}, .dense_ns = 500'000'000, .samples = {}};
  const auto predicted_with = [&](const std::vector<EngineTensor>& those) {
    std::int64_t predicted_ns = 0;
    const std::vector<Status> statuses = run_ranks(4, [&](Communicator& communicator) -> Status {
      const Topology topology = Topology::two_levels(4, 2).value();
      const CandidateRequest request{those, options, topology, cluster, {}};
      const Result<Candidates> own = find_candidates(request, steps, &communicator, steady_clock());
      if (own.ok() && communicator.rank() == 0) predicted_ns = predicted(own.value(), setting);
      return own.status();
    });
    for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
    return predicted_ns;
  };
  const std::int64_t without_ns = predicted_with(kTensors);
  EXPECT_GT(without_ns, 3'000'000);
  steps.ready_ns.push_back(3'000'000);
  EXPECT_EQ(predicted_with(tensors), without_ns);
}

// Engines of plans work in float32, whatever the gradients are.
TEST(Candidates, PlansForNarrowGradientsArePricedAsWhatTheirEnginesSend) {
  const Cluster cluster = two_machines(500, {"cast(fp16)"});
  std::vector<EngineTensor> narrow = kTensors;
  for (EngineTensor& tensor : narrow) tensor.dtype = DType::kBFloat16;
  const Candidates wide = find(Quality::kSafe, cluster),
                   found = find(Quality::kSafe, cluster, 100'000'000, false, narrow);
  ASSERT_GT(predicted(wide, "plan("), 0);
  EXPECT_EQ(predicted(found, "plan("), predicted(wide, "plan("));
}

TEST(Candidates, PlansKeepNoResidualOfCasts) {
  const Candidates found = find(Quality::kSafe, two_machines(500, {"cast(bf16)"}));
  const Plan plan = plan_among(found);
  int casts = 0;
  for (const PlanBucket& bucket : plan.buckets) {
    if (bucket.option.encodes() == 0) continue;
    EXPECT_EQ(bucket.codec, "cast(bf16)");
    EXPECT_FALSE(bucket.error_feedback);
    ++casts;
  }
  EXPECT_GT(casts, 0);
}

// Three layers of 4 MB, as many bytes in 16 bits; what a dense step takes as predicted.
std::int64_t dense_ns(const Cluster& cluster, DType dtype, bool takes_buffers) {
  const std::int64_t rows = dtype == DType::kFloat32 ? 1000 : 2000;
  std::vector<EngineTensor> tensors;
  for (const char* name : {"first", "second", "third"}) {
    tensors.push_back({.name = name, .dtype = dtype, .rows = rows, .cols = 1000});
  }
  AutoOptions options{.quality = Quality::kSafe, .cluster = {}, .measure_s = 0, .transport_version = {}};
  options.takes_buffers = takes_buffers;
  const MeasuredSteps steps{
      .ready_ns = {300'000'000, 200'000'000, 100'000'000}, .dense_ns = 500'000'000, .samples = {}};
  const Topology topology = Topology::two_levels(4, 2).value();
  std::int64_t predicted_ns = 0;
  const std::vector<Status> statuses = run_ranks(4, [&](Communicator& communicator) -> Status {
    const CandidateRequest request{tensors, options, topology, cluster, {}};
    const Result<Candidates> own = find_candidates(request, steps, &communicator, steady_clock());
    if (own.ok() && communicator.rank() == 0) predicted_ns = own.value().list[0].predicted_ns;
    return own.status();
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  return predicted_ns;
}

// Where auto gets no buffers, its engine makes messages of about a MB: each layer leaves when it is there. Float32
// travels, whatever gradients are.
TEST(Candidates, DenseWithoutBuffersIsPredictedAsTheEngineSendsIt) {
  const Cluster cluster = two_machines(2, {"cast(bf16)"});
  constexpr std::int64_t kLayerNs = 24'000'000;  // 4 MB over both levels; one leaves every 100 ms
  const std::int64_t fused_ns = dense_ns(cluster, DType::kFloat32, false);
  EXPECT_EQ(fused_ns, 300'000'000 + kLayerNs);
  EXPECT_EQ(fused_ns, dense_ns(cluster, DType::kFloat32, true));  // as buffers that were ready apart
  EXPECT_GE(dense_ns(cluster, DType::kBFloat16, false), 300'000'000 + 2 * kLayerNs);
  EXPECT_EQ(dense_ns(cluster, DType::kBFloat16, true), fused_ns);
}

// Steps in which nothing travels, and the dense steps that all is compared with, may be of different machines' speed.
TEST(Candidates, ArePredictedAtThePaceOfTheDenseSteps) {
  const Cluster cluster = two_machines(500, auto_codecs(Quality::kSafe));
  const auto predicted = [&](std::int64_t ready_ns, std::int64_t first_ready_ns, std::int64_t dense_first_ready_ns) {
    const AutoOptions options{.quality = Quality::kSafe, .cluster = {}, .measure_s = 0, .transport_version = {}};
    const MeasuredSteps steps{.ready_ns = {2 * ready_ns, ready_ns},
                              .first_ready_ns = first_ready_ns,
                              .dense_ns = 500'000'000,
                              .dense_first_ready_ns = dense_first_ready_ns,
                              .samples = {}};
    std::map<std::string, std::int64_t> times_ns;
    run_ranks(4, [&](Communicator& communicator) -> Status {
      const CandidateRequest request{kTensors, options, Topology::two_levels(4, 2).value(), cluster, {}};
      const Result<Candidates> own = find_candidates(request, steps, &communicator, steady_clock());
      if (!own.ok()) return own.status();
      if (communicator.rank() != 0) return {};
      for (const AutoCandidate& candidate : own.value().list) {
        if (!candidate.label.starts_with("plan(")) times_ns[candidate.label] = candidate.predicted_ns;
      }
      return {};
    });
    return times_ns;
  };
  const auto slow = predicted(150'000'000, 0, 0);
  EXPECT_GE(slow.size(), 3u);
  EXPECT_EQ(predicted(100'000'000, 20'000'000, 30'000'000), slow);
  EXPECT_NE(predicted(100'000'000, 0, 30'000'000), slow) << "not known, 1";
  EXPECT_EQ(predicted(150'000'000, 20'000'000, 0), slow);
  EXPECT_EQ(predicted(150'000'000, 20'000'000, 50'000'000), slow) << "something else held these steps up";
}

// On a machine that is half as fast computation and codecs take twice as long, and links what they did.
TEST(Candidates, APaceIsThatOfComputationAndCodecs) {
  const auto longer = [](std::int64_t inter_ns_per_byte, const std::string& codec, bool is_plan) {
    const Candidates found = find(Quality::kSafe, two_machines(inter_ns_per_byte, {codec}));
    for (const AutoCandidate& candidate : found.list) {
      if (is_plan ? !candidate.label.starts_with("plan(") : candidate.label != codec) continue;
      const double paces[] = {1, 2};
      const std::vector<std::int64_t> times_ns = found.predict(candidate, {}, paces).value();
      EXPECT_EQ(times_ns[0], candidate.predicted_ns);
      return times_ns[1] - times_ns[0];
    }
    ADD_FAILURE() << "no such candidate";
    return std::int64_t{0};
  };
  constexpr double kCodecsNs = 2e6;
  EXPECT_NEAR(static_cast<double>(longer(1, "cast(bf16)", false)), 200e6, kCodecsNs);
  // The link is busy from the first gradient on, which is ready 100 ms later.
  EXPECT_NEAR(static_cast<double>(longer(500, "cast(bf16)", false)), 100e6, kCodecsNs);
  // The plan's one bucket waits for both.
  EXPECT_NEAR(static_cast<double>(longer(500, "cast(bf16)", true)), 200e6, kCodecsNs);
}

// Payloads that vary are predicted from what was seen of the gradients.
TEST(Candidates, SamplesTellWhatVaryingPayloadsTake) {
  const Cluster cluster = two_machines(500, auto_codecs(Quality::kBalanced));
  const auto predicted = [&](const GradientSamples& samples, const std::string& label) {
    const AutoOptions options{.quality = Quality::kBalanced, .cluster = {}, .measure_s = 0, .transport_version = {}};
    const MeasuredSteps steps{.ready_ns = {200'000'000, 100'000'000}, .dense_ns = 500'000'000, .samples = samples};
    const Topology topology = Topology::two_levels(4, 2).value();
    std::int64_t predicted_ns = -1;
    run_ranks(4, [&](Communicator& communicator) -> Status {
      const CandidateRequest request{kTensors, options, topology, cluster, {}};
      const Result<Candidates> own = find_candidates(request, steps, &communicator, steady_clock());
      if (!own.ok()) return own.status();
      EXPECT_EQ(own.value().predict != nullptr, communicator.rank() == 0);
      if (communicator.rank() != 0) return {};
      for (const AutoCandidate& candidate : own.value().list) {
        if (candidate.label == label) predicted_ns = candidate.predicted_ns;
      }
      const double as_dense[] = {1};
      EXPECT_EQ(own.value().predict(candidate_of(label).value(), samples, as_dense).value(), std::vector{predicted_ns})
          << "as it was";
      return {};
    });
    return predicted_ns;
  };
  std::vector<float> nearly_zero(65536, 1e-6f);
  nearly_zero[0] = 1;
  const std::int64_t normal_ns = predicted({}, "compso(bound=4e-3)");
  EXPECT_GT(normal_ns, 0);
  EXPECT_LT(predicted({nearly_zero, nearly_zero}, "compso(bound=4e-3)"), normal_ns);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(predicted({std::vector<float>(65536), std::vector<float>(65536, nan)}, "compso(bound=4e-3)"), normal_ns);
  EXPECT_FALSE(tell_sizes({std::vector<float>(65536), std::vector<float>(65536, nan)}));
  EXPECT_TRUE(tell_sizes({std::vector<float>(65536, nan), nearly_zero}));
  const auto varies = [](const char* what) { return has_varying_payloads(candidate_of(what).value()); };
  const std::string entropy_coded = "quant(error=0.3, round=dead_zone, coder=rans)";
  EXPECT_TRUE(varies("compso(bound=4e-3)"));
  EXPECT_TRUE(varies(entropy_coded.c_str()));
  EXPECT_LT(predicted({nearly_zero, nearly_zero}, entropy_coded), predicted({}, entropy_coded));
  for (const char* what : {"none", "cast(bf16)", "quant(bits=4)"}) EXPECT_FALSE(varies(what));
  // What the filter takes from a gradient passes it with the next.
  std::vector<float> held_back(65536, 0.003f);
  held_back[0] = 1;
  EXPECT_GT(predicted({held_back, held_back}, "compso(bound=4e-3)"),
            predicted({nearly_zero, nearly_zero}, "compso(bound=4e-3)"));
  EXPECT_EQ(predicted({nearly_zero}, "quant(bits=4, round=dead_zone)"),
            predicted({}, "quant(bits=4, round=dead_zone)"));
}

// Dense steps took less than was predicted of them: as much less is predicted of the settings. Dense stays.
TEST(Candidates, DenseIsFirstEvenIfItsPredictionWasFarOff) {
  AutoOptions options{.quality = Quality::kSafe, .cluster = {}, .measure_s = 0.05, .transport_version = {}};
  const MeasuredSteps steps{.ready_ns = {200'000'000, 100'000'000}, .dense_ns = 1000, .samples = {}};
  const Topology topology = Topology::two_levels(2, 1).value();
  const std::vector<Status> statuses = run_ranks(2, [&](Communicator& communicator) -> Status {
    const CandidateRequest request{kTensors, options, topology, std::nullopt, {}};
    const Result<Candidates> found = find_candidates(request, steps, &communicator, steady_clock());
    if (!found.ok()) return found.status();
    EXPECT_EQ(labels(found.value()).front(), "dense");
    EXPECT_GT(found.value().list[0].predicted_ns, 100'000'000);
    for (const AutoCandidate& candidate : std::span(found.value().list).subspan(1)) {
      EXPECT_NEAR(static_cast<double>(candidate.predicted_ns), 1000, 200) << candidate.label;
    }
    return {};
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

// Who sends less has less of what nothing explains in dense steps.
TEST(Candidates, WhatDenseStepsTakeBeyondTheirPredictionIsAddedAsLinksAreBusy) {
  AutoOptions options{.quality = Quality::kSafe, .cluster = {}, .measure_s = 0.05, .transport_version = {}};
  const MeasuredSteps steps{.ready_ns = {200'000'000, 100'000'000}, .dense_ns = 10'000'000'000, .samples = {}};
  const Topology topology = Topology::two_levels(2, 1).value();
  const std::vector<Status> statuses = run_ranks(2, [&](Communicator& communicator) -> Status {
    const CandidateRequest request{kTensors, options, topology, std::nullopt, {}};
    const Result<Candidates> found = find_candidates(request, steps, &communicator, steady_clock());
    if (!found.ok()) return found.status();
    EXPECT_LT(found.value().list[0].predicted_ns, 5'000'000'000) << "dense is told as the links were measured";
    EXPECT_GT(found.value().list.size(), 1u);
    for (const AutoCandidate& candidate : std::span(found.value().list).subspan(1)) {
      EXPECT_GT(candidate.predicted_ns, 1'000'000'000) << candidate.label;
      EXPECT_LT(candidate.predicted_ns, 20'000'000'000) << candidate.label;
    }
    return {};
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST(Candidates, WithoutAClusterAllAre) {
  for (const auto& [quality, count] :
       {std::pair(Quality::kSafe, 3), std::pair(Quality::kBalanced, 6), std::pair(Quality::kAggressive, 11)}) {
    const Candidates found = find(quality, std::nullopt);
    EXPECT_EQ(found.list.size(), static_cast<std::size_t>(count));
    for (const AutoCandidate& candidate : found.list) EXPECT_EQ(candidate.predicted_ns, -1);
  }
}

// One trial step that overflows would be delivered.
TEST(Candidates, CastsToFloat16NeedGradientsFarBelowItsLargest) {
  const Topology topology = Topology::two_levels(4, 2).value();
  const auto find_with = [&](double largest, std::optional<Cluster> cluster) {
    const AutoOptions options{.quality = Quality::kSafe, .cluster = {}, .measure_s = 0, .transport_version = {}};
    const MeasuredSteps steps{
        .ready_ns = {200'000'000, 100'000'000}, .dense_ns = 500'000'000, .largest_gradient = largest, .samples = {}};
    std::vector<Candidates> found(4);
    const std::vector<Status> statuses = run_ranks(4, [&](Communicator& communicator) -> Status {
      const CandidateRequest request{kTensors, options, topology, cluster, {}};
      CORTADO_ASSIGN_OR_RETURN(found[static_cast<std::size_t>(communicator.rank())],
                               find_candidates(request, steps, &communicator, steady_clock()));
      return {};
    });
    for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
    for (const Candidates& of : found) EXPECT_EQ(candidates_to_json(of), candidates_to_json(found[0]));
    return found[0];
  };
  // Known times of cast(fp16) alone: a plan could encode with nothing else.
  const std::optional<Cluster> only_fp16 = two_machines(500, {"cast(fp16)"});
  const std::vector<std::string> all = {"dense", "cast(bf16)", "cast(fp16)"};
  EXPECT_EQ(labels(find_with(65504.0 / 64, std::nullopt)), all);
  EXPECT_TRUE(find_with(65504.0 / 64, std::nullopt).notes.empty());
  EXPECT_TRUE(has(labels(find_with(65504.0 / 64, only_fp16)), "plan"));
  for (const double largest : {1024.0, std::numeric_limits<double>::infinity()}) {
    const Candidates found = find_with(largest, std::nullopt);
    EXPECT_EQ(labels(found), (std::vector<std::string>{"dense", "cast(bf16)"}));
    ASSERT_EQ(found.notes.size(), 1u);
    EXPECT_TRUE(
        found.notes[0].starts_with("cast(fp16) is left out, of plans too: fp16 ends at 65504, and the largest "
                                   "gradient, "))
        << found.notes[0];
    const std::vector<std::string> planned = labels(find_with(largest, only_fp16));
    EXPECT_FALSE(has(planned, "plan"));
    EXPECT_FALSE(has(planned, "cast(fp16)"));
  }
}

}  // namespace
}  // namespace cortado
