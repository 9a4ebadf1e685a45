// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kfac/kfac_testing.h"

namespace cortado {
namespace {

Cluster four_ranks(std::int64_t ns_per_byte) {
  Cluster cluster;
  ClusterLevel level{.name = "all", .ranks = 4, .link = "", .collectives = {}, .unknown = {}};
  for (const OpKind kind : {OpKind::kReduceScatter, OpKind::kAllGather, OpKind::kAllToAll}) {
    level.collectives[kind] = {{1, 1000}, {ns_per_byte, 1000 * ns_per_byte}};
  }
  cluster.levels = {level};
  for (const char* codec : {"compso(bound=0.004)", "quant(bits=8)"}) {
    for (const OpKind direction : {OpKind::kEncode, OpKind::kDecode}) {
      cluster.codecs.push_back({.codec = codec,
                                .device = OpDevice::kCpu,
                                .direction = direction,
                                .threads = 1,
                                .curve = {{1, 1000}, {1501, 2500}},
                                .unknown = {}});
    }
  }
  return cluster;
}

KfacOptions automatic(KfacStrategy strategy, std::int64_t ns_per_byte) {
  KfacOptions options;
  options.strategy = strategy;
  options.workers = strategy == KfacStrategy::kHybridOpt ? 2 : 0;
  options.timeout_s = 20;
  options.gradients.codec = options.factor_compression = "auto";
  options.candidates = {"compso(bound=0.004)", "quant(bits=8)", "topk(density=0.01)"};
  options.cluster = four_ranks(ns_per_byte);
  return options;
}

// [rank]: what each chose.
std::vector<std::vector<KfacChoice>> choices_after(const KfacOptions& options, int steps) {
  SmallRun run{.options = options, .values = {}};
  std::vector<std::vector<KfacChoice>> choices(4);
  expect_replicas_are_equal(run_job(
      run, steps, [&](Kfac& kfac, int rank) { choices[static_cast<std::size_t>(rank)] = kfac.report().choices; }));
  return choices;
}

TEST(KfacAuto, CompressesOverASlowLinkAndDeclinesOverAFastOne) {
  for (const KfacStrategy strategy :
       {KfacStrategy::kCommOpt, KfacStrategy::kHybridOpt, KfacStrategy::kMemOpt, KfacStrategy::kDpKfac}) {
    for (const std::int64_t ns_per_byte : {1000, 1}) {
      const auto choices = choices_after(automatic(strategy, ns_per_byte), 4);
      std::vector<std::string> messages;
      for (std::size_t c = 0; c < choices[0].size(); ++c) {
        const KfacChoice& choice = choices[0][c];
        messages.push_back(choice.message);
        EXPECT_EQ(choice.codec != "none", ns_per_byte == 1000) << choice.message << " " << choice.reason;
        EXPECT_EQ(choice.reason.starts_with("uncompressed: "), ns_per_byte == 1) << choice.reason;
        EXPECT_EQ(choice.predicted_ns < choice.predicted_uncompressed_ns, ns_per_byte == 1000);
        EXPECT_GT(choice.measured_ns, 0);
        for (const auto& other : choices) {
          EXPECT_EQ(other[c].codec, choice.codec);
          EXPECT_EQ(other[c].aggregate, choice.aggregate);
          EXPECT_EQ(other[c].reason, choice.reason);
        }
      }
      const std::vector<std::string> expected =
          strategy == KfacStrategy::kCommOpt     ? std::vector<std::string>{"factors", "inverses"}
          : strategy == KfacStrategy::kHybridOpt ? std::vector<std::string>{"factors", "inverses", "gradients"}
          : strategy == KfacStrategy::kMemOpt    ? std::vector<std::string>{"factors", "gradients"}
                                                 : std::vector<std::string>{"gradients"};
      EXPECT_EQ(messages, expected);
    }
  }
}

// What it declines is as if it had not been asked; what it takes is that codec.
TEST(KfacAuto, StepsAreThoseOfWhatItChose) {
  SmallRun run{.options = automatic(KfacStrategy::kMemOpt, 1), .values = {}};
  const History declined = run_job(run, 3);
  SmallRun plain = run;
  plain.options.gradients.codec = plain.options.factor_compression = "none";
  EXPECT_TRUE(declined == run_job(plain, 3));

  run.options.cluster = four_ranks(1000);
  run.options.factor_compression = "none";
  const KfacChoice choice = choices_after(run.options, 1)[0].back();
  plain.options.gradients.codec = choice.codec;
  plain.options.gradients.aggregate = choice.aggregate;
  EXPECT_TRUE(run_job(run, 3) == run_job(plain, 3)) << choice.reason;
}

TEST(KfacAuto, DecidesAgainAfterTenMessages) {
  std::vector<std::size_t> gathers;
  const std::vector<Status> statuses = run_ranks(4, [&](Communicator& communicator) -> Status {
    RecordingCommunicator recording(&communicator);
    SmallRun run{.options = automatic(KfacStrategy::kDpKfac, 1), .values = {}};
    CORTADO_ASSIGN_OR_RETURN(const auto kfac, Kfac::create(small_job(), run.options, &recording));
    for (int step = 0; step < 12; ++step) {
      recording.clear();
      CORTADO_RETURN_IF_ERROR(run_step(*kfac, run, communicator.rank(), step).status());
      if (communicator.rank() == 0) gathers.push_back(recording.log().size());
    }
    return {};
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  EXPECT_EQ(gathers, (std::vector<std::size_t>{3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 3, 1}));
}

TEST(KfacAuto, ValuesThatAreNotFiniteDecideNothing) {
  std::vector<KfacChoice> choices;
  const std::vector<Status> statuses = run_ranks(4, [&](Communicator& communicator) -> Status {
    SmallRun run{.options = automatic(KfacStrategy::kDpKfac, 1000), .values = {}};
    CORTADO_ASSIGN_OR_RETURN(const auto kfac, Kfac::create(small_job(), run.options, &communicator));
    for (const bool is_finite : {false, true}) {
      Gradients gradients = gradients_of(kfac->layers(), 4, -1, 0);
      if (!is_finite) gradients[2][1] = INFINITY;
      CORTADO_RETURN_IF_ERROR(kfac->step({}, addresses_of(kfac->layers(), &gradients)).status());
      if (communicator.rank() == 1) choices.push_back(kfac->report().choices[0]);
    }
    return {};
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  EXPECT_EQ(choices[0].reason, "");
  EXPECT_NE(choices[1].codec, "none") << choices[1].reason;
}

TEST(KfacAuto, WrongOptionsAreRefusedOnAllRanks) {
  const auto statuses_of = [](const KfacOptions& options) {
    return run_ranks(
        4, [&](Communicator& communicator) { return Kfac::create(small_job(), options, &communicator).status(); });
  };
  KfacOptions options = automatic(KfacStrategy::kMemOpt, 1);
  options.cluster->levels[0].ranks = 2;
  for (const Status& status : statuses_of(options)) {
    EXPECT_NE(status.message().find("needs a cluster of 4 ranks, got one of 2"), std::string::npos) << status.message();
  }
  options = automatic(KfacStrategy::kMemOpt, 1);
  options.candidates.push_back("acp(rank=2)");
  for (const Status& status : statuses_of(options)) EXPECT_EQ(status.code(), StatusCode::kUnsupported);

  // They would try different numbers of settings.
  const auto statuses = run_ranks(4, [](Communicator& communicator) {
    KfacOptions one = automatic(KfacStrategy::kHybridOpt, 1);
    one.gradients.aggregate = communicator.rank() < 2 ? 0 : 4;
    return Kfac::create(small_job(), one, &communicator).status();
  });
  for (const Status& status : statuses) EXPECT_EQ(status.code(), StatusCode::kMismatch) << status.to_string();
}

}  // namespace
}  // namespace cortado
