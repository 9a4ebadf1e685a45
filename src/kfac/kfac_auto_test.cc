// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "collective/collective_call.h"
#include "collective/passing_communicator_testing.h"
#include "core/check.h"
#include "cortado/trace.h"
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

// Time of one rank, which moves with what it sends or receives: nothing else takes any.
class HandClock final : public Clock {
 public:
  std::int64_t now_ns() const override { return now_ns_; }
  void advance(std::int64_t ns) { now_ns_ += ns; }

 private:
  std::int64_t now_ns_ = 0;
};

class TimedLink final : public PassingCommunicator {
 public:
  TimedLink(Communicator* inner, std::int64_t ns_per_byte, HandClock* clock)
      : PassingCommunicator(inner), ns_per_byte_(ns_per_byte), clock_(clock) {}

  Result<WorkId> start(const CollectiveCall& call) override {
    const std::int64_t elems =
        std::max(sent_elems(call, rank(), world_size()), received_elems(call, rank(), world_size()));
    clock_->advance(1000 + elems * static_cast<std::int64_t>(dtype_bytes(call.dtype)) * ns_per_byte_);
    return inner_->start(call);
  }
  Result<std::unique_ptr<Communicator>> subgroup(std::span<const int> ranks) override {
    CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> group, inner_->subgroup(ranks));
    auto timed = std::make_unique<TimedLink>(group.get(), ns_per_byte_, clock_);
    timed->owned_ = std::move(group);
    return std::unique_ptr<Communicator>(std::move(timed));
  }

 private:
  std::int64_t ns_per_byte_;
  HandClock* clock_;
  std::unique_ptr<Communicator> owned_;
};

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

// A job over a TimedLink.
struct Timed {
  History history;
  std::vector<std::vector<std::vector<KfacChoice>>> choices;  // [rank][step]
};

Timed run_timed(const KfacOptions& options, std::int64_t ns_per_byte, int steps) {
  Timed timed;
  timed.history.resize(4);
  timed.choices.resize(4);
  const std::vector<Status> statuses = run_ranks(4, [&](Communicator& communicator) -> Status {
    HandClock clock;
    TimedLink link(&communicator, ns_per_byte, &clock);
    const auto rank = static_cast<std::size_t>(communicator.rank());
    const SmallRun run{.options = options, .values = {}};
    CORTADO_ASSIGN_OR_RETURN(const auto kfac, Kfac::create(small_job(), options, &link, &clock));
    for (int step = 0; step < steps; ++step) {
      CORTADO_ASSIGN_OR_RETURN(Gradients after, run_step(*kfac, run, communicator.rank(), step));
      timed.history[rank].push_back(std::move(after));
      timed.choices[rank].push_back(kfac->report().choices);
    }
    return {};
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  expect_replicas_are_equal(timed.history);
  return timed;
}

constexpr int kUntilPredicted = 9, kUntilDecided = 17;  // steps

TEST(KfacAuto, CompressesOverASlowLinkAndDeclinesOverAFastOne) {
  for (const KfacStrategy strategy :
       {KfacStrategy::kCommOpt, KfacStrategy::kHybridOpt, KfacStrategy::kMemOpt, KfacStrategy::kDpKfac}) {
    for (const std::int64_t ns_per_byte : {1000, 1}) {
      const Timed timed = run_timed(automatic(strategy, ns_per_byte), ns_per_byte, kUntilDecided);
      const std::vector<KfacChoice>& choices = timed.choices[0].back();
      std::vector<std::string> messages;
      for (std::size_t c = 0; c < choices.size(); ++c) {
        const KfacChoice& choice = choices[c];
        messages.push_back(choice.message);
        EXPECT_EQ(choice.codec != "none", ns_per_byte == 1000) << choice.message << " " << choice.reason;
        EXPECT_EQ(choice.reason.starts_with("uncompressed: "), ns_per_byte == 1) << choice.reason;
        EXPECT_EQ(choice.predicted_ns < choice.predicted_uncompressed_ns, ns_per_byte == 1000);
        EXPECT_GT(choice.measured_uncompressed_ns, 0);
        EXPECT_EQ(choice.measured_ns > 0, ns_per_byte == 1000);
        EXPECT_EQ(timed.choices[0][0][c].codec, "none");
        EXPECT_EQ(timed.choices[0][0][c].reason, "uncompressed at first, to measure it");
        for (const auto& of_rank : timed.choices) {
          const KfacChoice& other = of_rank.back()[c];
          EXPECT_EQ(other.codec, choice.codec);
          EXPECT_EQ(other.aggregate, choice.aggregate);
          EXPECT_EQ(other.reason, choice.reason);
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

// The link is said to be slow, and all messages take the same time.
TEST(KfacAuto, WhatDoesNotGainByTheClockIsGivenUp) {
  const Timed timed = run_timed(automatic(KfacStrategy::kMemOpt, 1000), 0, kUntilDecided);
  for (std::size_t c = 0; c < 2; ++c) {
    const KfacChoice& tried = timed.choices[0][kUntilPredicted - 1][c];
    EXPECT_NE(tried.codec, "none") << tried.reason;
    EXPECT_EQ(tried.measured_ns, 0);
    const KfacChoice& choice = timed.choices[0].back()[c];
    EXPECT_EQ(choice.codec, "none");
    EXPECT_EQ(choice.aggregate, 0);
    EXPECT_LT(choice.predicted_ns, choice.predicted_uncompressed_ns);
    EXPECT_GE(choice.measured_ns, choice.measured_uncompressed_ns);
    EXPECT_EQ(choice.reason.find("uncompressed, as it gains too little: " + tried.reason + ", measured "), 0u)
        << choice.reason;
  }
}

// What it declines is as if it had not been asked; what it takes is that codec.
TEST(KfacAuto, StepsAreThoseOfWhatItChose) {
  SmallRun plain{.options = automatic(KfacStrategy::kMemOpt, 1), .values = {}};
  const Timed declined = run_timed(plain.options, 1, kUntilDecided);
  plain.options.gradients.codec = plain.options.factor_compression = "none";
  EXPECT_TRUE(declined.history == run_job(plain, kUntilDecided));

  KfacOptions options = automatic(KfacStrategy::kMemOpt, 1000);
  options.factor_compression = "none";
  const Timed taken = run_timed(options, 1000, kUntilDecided + 2);
  const KfacChoice& choice = taken.choices[0].back()[0];
  ASSERT_NE(choice.codec, "none") << choice.reason;
  const History as_it_is = run_job(plain, kUntilDecided + 2);
  plain.options.gradients.codec = choice.codec;
  plain.options.gradients.aggregate = choice.aggregate;
  const History compressed = run_job(plain, kUntilDecided + 2);
  for (std::size_t step = 0; step < kUntilDecided + 2; ++step) {
    EXPECT_EQ(taken.history[0][step], (step + 1 < kUntilPredicted ? as_it_is : compressed)[0][step]) << step;
  }
}

TEST(KfacAuto, DecidesAgainAfterAHundredMessages) {
  const KfacOptions options = automatic(KfacStrategy::kDpKfac, 1000);
  const Timed timed = run_timed(options, 1000, 100 + kUntilDecided);
  for (std::size_t step = 0; step < timed.choices[0].size(); ++step) {
    const bool is_uncompressed = step + 1 < kUntilPredicted || (step >= 100 && step + 1 < 100 + kUntilPredicted);
    EXPECT_EQ(timed.choices[0][step][0].codec == "none", is_uncompressed) << step;
  }
}

// Two more all-gathers where it predicts, one where it compares.
TEST(KfacAuto, MessagesOfItsOwnAreFew) {
  std::vector<std::size_t> gathers;
  const std::vector<Status> statuses = run_ranks(4, [&](Communicator& communicator) -> Status {
    HandClock clock;
    TimedLink link(&communicator, 1, &clock);
    RecordingCommunicator recording(&link);
    SmallRun run{.options = automatic(KfacStrategy::kDpKfac, 1), .values = {}};
    CORTADO_ASSIGN_OR_RETURN(const auto kfac, Kfac::create(small_job(), run.options, &recording, &clock));
    for (int step = 0; step < kUntilDecided; ++step) {
      recording.clear();
      CORTADO_RETURN_IF_ERROR(run_step(*kfac, run, communicator.rank(), step).status());
      if (communicator.rank() == 0) gathers.push_back(recording.log().size());
    }
    return {};
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  std::vector<std::size_t> expected(kUntilDecided, 1);
  expected[kUntilPredicted - 1] = 3;
  EXPECT_EQ(gathers, expected);
}

TEST(KfacAuto, ValuesThatAreNotFiniteDecideNothing) {
  std::vector<KfacChoice> choices;
  const std::vector<Status> statuses = run_ranks(4, [&](Communicator& communicator) -> Status {
    SmallRun run{.options = automatic(KfacStrategy::kDpKfac, 1000), .values = {}};
    CORTADO_ASSIGN_OR_RETURN(const auto kfac, Kfac::create(small_job(), run.options, &communicator));
    for (int step = 1; step <= kUntilPredicted + 1; ++step) {
      Gradients gradients = gradients_of(kfac->layers(), 4, -1, 0);
      if (step == kUntilPredicted) gradients[2][1] = INFINITY;
      CORTADO_RETURN_IF_ERROR(kfac->step({}, addresses_of(kfac->layers(), &gradients)).status());
      if (communicator.rank() == 1) choices.push_back(kfac->report().choices[0]);
    }
    return {};
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  EXPECT_EQ(choices[kUntilPredicted - 1].predicted_ns, 0);
  EXPECT_NE(choices[kUntilPredicted].codec, "none") << choices[kUntilPredicted].reason;
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
