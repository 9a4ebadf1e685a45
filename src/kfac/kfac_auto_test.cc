// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
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
  for (const char* codec : {"compso(bound=0.004)", "quant(bits=2)"}) {
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

// What a rank's collective takes: by rank, how many it has started before, bytes.
using LinkTime = std::function<std::int64_t(int rank, int before, std::int64_t bytes)>;

LinkTime slow(std::int64_t ns_per_byte) {
  return [=](int, int, std::int64_t bytes) { return 1000 + bytes * ns_per_byte; };
}

class TimedLink final : public PassingCommunicator {
 public:
  TimedLink(Communicator* inner, int rank_in_job, LinkTime time, HandClock* clock)
      : PassingCommunicator(inner), rank_in_job_(rank_in_job), time_(std::move(time)), clock_(clock) {}

  Result<WorkId> start(const CollectiveCall& call) override {
    const std::int64_t elems =
        std::max(sent_elems(call, rank(), world_size()), received_elems(call, rank(), world_size()));
    clock_->advance(time_(rank_in_job_, started_++, elems * static_cast<std::int64_t>(dtype_bytes(call.dtype))));
    return inner_->start(call);
  }
  Result<std::unique_ptr<Communicator>> subgroup(std::span<const int> ranks) override {
    CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> group, inner_->subgroup(ranks));
    auto timed = std::make_unique<TimedLink>(group.get(), rank_in_job_, time_, clock_);
    timed->owned_ = std::move(group);
    return std::unique_ptr<Communicator>(std::move(timed));
  }

 private:
  int rank_in_job_;
  LinkTime time_;
  HandClock* clock_;
  int started_ = 0;
  std::unique_ptr<Communicator> owned_;
};

KfacOptions automatic(KfacStrategy strategy, std::int64_t ns_per_byte) {
  KfacOptions options;
  options.strategy = strategy;
  options.workers = strategy == KfacStrategy::kHybridOpt ? 2 : 0;
  options.timeout_s = 20;
  options.gradients.codec = options.factor_compression = "auto";
  options.candidates = {"compso(bound=0.004)", "quant(bits=2)", "topk(density=0.01)"};
  options.cluster = four_ranks(ns_per_byte);
  return options;
}

// A job over a TimedLink.
struct Timed {
  History history;
  std::vector<std::vector<std::vector<KfacChoice>>> choices;  // [rank][step]
  std::vector<std::size_t> collectives;                       // [step], of rank 0
};

Timed run_timed(const KfacOptions& options, const LinkTime& time, int steps) {
  Timed timed;
  timed.history.resize(4);
  timed.choices.resize(4);
  const std::vector<Status> statuses = run_ranks(4, [&](Communicator& communicator) -> Status {
    HandClock clock;
    TimedLink link(&communicator, communicator.rank(), time, &clock);
    RecordingCommunicator recording(&link);
    const auto rank = static_cast<std::size_t>(communicator.rank());
    SmallRun run{.options = options, .values = {}};
    run.values.kl_clip = 0;  // which would make a step depend on what another has lost
    CORTADO_ASSIGN_OR_RETURN(const auto kfac, Kfac::create(small_job(), run.options, &recording, &clock));
    for (int step = 0; step < steps; ++step) {
      recording.clear();
      CORTADO_ASSIGN_OR_RETURN(Gradients after, run_step(*kfac, run, communicator.rank(), step));
      timed.history[rank].push_back(std::move(after));
      timed.choices[rank].push_back(kfac->report().choices);
      if (rank == 0) timed.collectives.push_back(recording.log().size());
    }
    return {};
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  expect_replicas_are_equal(timed.history);
  for (std::size_t step = 0; step < timed.choices[0].size(); ++step) {
    for (std::size_t c = 0; c < timed.choices[0][step].size(); ++c) {
      const KfacChoice& choice = timed.choices[0][step][c];
      for (const auto& of_rank : timed.choices) {
        EXPECT_EQ(of_rank[step][c].codec, choice.codec);
        EXPECT_EQ(of_rank[step][c].aggregate, choice.aggregate);
        EXPECT_EQ(of_rank[step][c].reason, choice.reason);
      }
    }
  }
  return timed;
}

constexpr int kRound = 6, kOnTrial = 24;  // messages on trial: where it is clear, and at most
bool is_compressed_on_trial(int message) { return message % kRound < 3; }

TEST(KfacAuto, CompressesOverASlowLinkAndDeclinesOverAFastOne) {
  for (const KfacStrategy strategy :
       {KfacStrategy::kCommOpt, KfacStrategy::kHybridOpt, KfacStrategy::kMemOpt, KfacStrategy::kDpKfac}) {
    for (const std::int64_t ns_per_byte : {1000, 1}) {
      const Timed timed = run_timed(automatic(strategy, ns_per_byte), slow(ns_per_byte), kOnTrial + 1);
      const std::vector<KfacChoice>& choices = timed.choices[0].back();
      std::vector<std::string> messages;
      for (std::size_t c = 0; c < choices.size(); ++c) {
        const KfacChoice& choice = choices[c];
        messages.push_back(choice.message);
        EXPECT_EQ(choice.codec != "none", ns_per_byte == 1000) << choice.message << " " << choice.reason;
        EXPECT_EQ(choice.reason.starts_with("uncompressed: "), ns_per_byte == 1) << choice.reason;
        EXPECT_EQ(choice.predicted_ns < choice.predicted_uncompressed_ns, ns_per_byte == 1000);
        EXPECT_EQ(choice.measured_ns > 0, ns_per_byte == 1000);
        EXPECT_EQ(choice.measured_uncompressed_ns > choice.measured_ns, ns_per_byte == 1000);
        for (int step = 0; step < kRound; ++step) {
          const bool compresses = ns_per_byte == 1000 && is_compressed_on_trial(step);
          EXPECT_EQ(timed.choices[0][static_cast<std::size_t>(step)][c].codec != "none", compresses) << step;
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

// The link is said to be slow. All messages take the same time; or they do on one rank, for which all wait.
TEST(KfacAuto, WhatDoesNotGainByTheClockIsGivenUp) {
  const LinkTime all_alike = slow(0);
  const LinkTime one_alike = [](int rank, int, std::int64_t bytes) { return rank == 2 ? 100'000'000 : bytes * 1000; };
  for (const KfacStrategy strategy : {KfacStrategy::kMemOpt, KfacStrategy::kHybridOpt}) {
    for (const LinkTime& time : {all_alike, one_alike}) {
      const Timed timed = run_timed(automatic(strategy, 1000), time, kOnTrial + 1);
      for (std::size_t c = 0; c < timed.choices[0][0].size(); ++c) {
        const KfacChoice& tried = timed.choices[0][0][c];
        EXPECT_NE(tried.codec, "none") << tried.reason;
        EXPECT_EQ(tried.measured_ns, 0);
        const KfacChoice& choice = timed.choices[0].back()[c];
        EXPECT_EQ(choice.codec, "none") << choice.reason;
        EXPECT_EQ(choice.aggregate, 0);
        EXPECT_LT(choice.predicted_ns, choice.predicted_uncompressed_ns);
        EXPECT_GE(choice.measured_ns, choice.measured_uncompressed_ns);
        const std::string predicted = tried.reason.substr(0, tried.reason.find(", on trial"));
        EXPECT_EQ(choice.reason.find("uncompressed, as it gains too little: " + predicted + ", measured "), 0u)
            << choice.reason;
        EXPECT_NE(tried.reason, predicted);
      }
    }
  }
}

// Two slow messages of the sixteen that count, on one rank.
TEST(KfacAuto, FewSlowMessagesDecideNothing) {
  const LinkTime time = [](int rank, int before, std::int64_t bytes) {
    return rank == 1 && (before == 2 || before == 8) ? std::int64_t{1'000'000'000'000} : bytes * 1000;
  };
  const Timed timed = run_timed(automatic(KfacStrategy::kDpKfac, 1000), time, kOnTrial + 1);
  const KfacChoice& choice = timed.choices[0].back()[0];
  EXPECT_NE(choice.codec, "none") << choice.reason;
  EXPECT_LT(choice.measured_ns, 1'000'000'000);
}

// What it declines is as if it had not been asked; what it takes is that codec.
TEST(KfacAuto, StepsAreThoseOfWhatItChose) {
  SmallRun plain{.options = automatic(KfacStrategy::kMemOpt, 1), .values = {.kl_clip = 0}};
  const Timed declined = run_timed(plain.options, slow(1), 3);
  plain.options.gradients.codec = plain.options.factor_compression = "none";
  EXPECT_TRUE(declined.history == run_job(plain, 3));

  constexpr int kSteps = kOnTrial + 3;
  KfacOptions options = automatic(KfacStrategy::kMemOpt, 1000);
  options.factor_compression = "none";
  const Timed taken = run_timed(options, slow(1000), kSteps);
  const KfacChoice& choice = taken.choices[0].back()[0];
  ASSERT_NE(choice.codec, "none") << choice.reason;
  const History as_it_is = run_job(plain, kSteps);
  plain.options.gradients.codec = choice.codec;
  plain.options.gradients.aggregate = choice.aggregate;
  const History compressed = run_job(plain, kSteps);
  for (std::size_t step = 0; step < kSteps; ++step) {
    const bool is_plain = taken.choices[0][step][0].codec == "none";
    EXPECT_EQ(taken.history[0][step], (is_plain ? as_it_is : compressed)[0][step]) << step;
  }
}

// With error feedback nothing is lost where messages change between the two.
TEST(KfacAuto, TurnsKeepWhatTheOwnerOwes) {
  KfacOptions options = automatic(KfacStrategy::kDpKfac, 1000);
  options.gradients.use_error_feedback = true;
  const Timed timed = run_timed(options, slow(1000), 4);
  SmallRun plain{.options = options, .values = {.kl_clip = 0}};
  plain.options.gradients.codec = "none";
  const History exact = run_job(plain, 4);
  // Three compressed messages, and one that brings all of what they have left.
  Gradients sum = timed.history[0][0], expected = exact[0][0];
  for (std::size_t step = 1; step < 4; ++step) {
    for (std::size_t i = 0; i < sum.size(); ++i) {
      for (std::size_t e = 0; e < sum[i].size(); ++e) {
        sum[i][e] += timed.history[0][step][i][e];
        expected[i][e] += exact[0][step][i][e];
      }
    }
  }
  EXPECT_GT(distance(timed.history[0][0], exact[0][0]), 1e-4);
  EXPECT_LT(distance(sum, expected), 1e-5);
}

TEST(KfacAuto, DecidesAgainAfterAThousandMessages) {
  const Timed timed = run_timed(automatic(KfacStrategy::kDpKfac, 1000), slow(1000), 1000 + kRound + 1);
  for (int step = 0; step < 1000 + kRound + 1; ++step) {
    const bool compresses = step % 1000 >= kRound || is_compressed_on_trial(step % 1000);
    EXPECT_EQ(timed.choices[0][static_cast<std::size_t>(step)][0].codec != "none", compresses) << step;
  }
}

// A note in each step, two all-gathers where it predicts, one before each message on trial, one where it compares.
// Beside them, sizes: the first message after one of another codec may not have the size that was expected.
TEST(KfacAuto, MessagesOfItsOwnAreFew) {
  EXPECT_EQ(run_timed(automatic(KfacStrategy::kDpKfac, 1000), slow(1000), kRound + 3).collectives,
            (std::vector<std::size_t>{5, 3, 3, 4, 3, 3, 3, 2, 2}));
  EXPECT_EQ(run_timed(automatic(KfacStrategy::kDpKfac, 1000), slow(0), kOnTrial + 2).collectives,
            (std::vector<std::size_t>{5, 3, 3, 4, 3, 3, 4, 3, 3, 4, 3, 3, 4, 3, 3, 4, 3, 3, 4, 3, 3, 4, 3, 3, 3, 2}));
  EXPECT_EQ(run_timed(automatic(KfacStrategy::kDpKfac, 1), slow(1), 3).collectives,
            (std::vector<std::size_t>{4, 2, 2}));
}

// Inverses of two columns: those of the second are most, and it is they that are predicted.
TEST(KfacAuto, TheColumnWithMostValuesStandsForAll) {
  KfacOptions options = automatic(KfacStrategy::kHybridOpt, 1000);
  std::int64_t whole_ns = 0;
  std::vector<KfacPlacement> placements;
  const std::vector<Status> statuses = run_ranks(4, [&](Communicator& communicator) -> Status {
    const SmallRun run{.options = options, .values = {}};
    CORTADO_ASSIGN_OR_RETURN(const auto kfac, Kfac::create(small_job(), options, &communicator));
    CORTADO_RETURN_IF_ERROR(run_step(*kfac, run, communicator.rank(), 0).status());
    if (communicator.rank() == 0) {
      whole_ns = kfac->report().choices[1].predicted_uncompressed_ns;
      placements = kfac->placements();
    }
    return {};
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  std::int64_t of_rank[4] = {};
  const std::vector<KfacLayer> layers = small_job();
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const std::int64_t a = layers[i].a_dim(), g = layers[i].g_dim();
    of_rank[placements[i].a_rank] += layers[i].groups * a * a;
    of_rank[placements[i].g_rank] += layers[i].groups * g * g;
  }
  const int heavy = of_rank[0] + of_rank[2] >= of_rank[1] + of_rank[3] ? 0 : 1;
  // 1000 ns for each of the bytes of two ranks that send as much as the one with most, of which another's are a half,
  // and of four ranks' three quarters.
  const std::int64_t most = std::max(of_rank[heavy], of_rank[heavy + 2]);
  EXPECT_NEAR(static_cast<double>(whole_ns), 4.0 * 2 * static_cast<double>(most) * (0.5 / 0.75) * 1000, 2000);
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

// Messages on trial with a NaN do not count: those that would have decided the first round are not among them.
TEST(KfacAuto, MessagesOnTrialThatAreNotFiniteDoNotCount) {
  const std::vector<Status> statuses = run_ranks(4, [&](Communicator& communicator) -> Status {
    HandClock clock;
    TimedLink link(&communicator, communicator.rank(), slow(1000), &clock);
    CORTADO_ASSIGN_OR_RETURN(const auto kfac,
                             Kfac::create(small_job(), automatic(KfacStrategy::kDpKfac, 1000), &link, &clock));
    for (int step = 0; step < 2 * kRound + 1; ++step) {
      Gradients gradients = gradients_of(kfac->layers(), 4, -1, 0);
      if (step > 0 && step < 3) gradients[2][1] = NAN;
      CORTADO_RETURN_IF_ERROR(kfac->step({}, addresses_of(kfac->layers(), &gradients)).status());
      EXPECT_EQ(kfac->report().choices[0].measured_ns > 0, step == 2 * kRound) << step;
    }
    EXPECT_NE(kfac->report().choices[0].codec, "none");
    return {};
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

// In the middle of a trial, too, where the codec is another one than at first.
TEST(KfacAuto, AStateThatIsLoadedIsDecidedForAnew) {
  for (const std::int64_t ns_per_byte : {1, 1000}) {
    const std::vector<Status> statuses = run_ranks(4, [&](Communicator& communicator) -> Status {
      HandClock clock;
      TimedLink link(&communicator, communicator.rank(), slow(ns_per_byte), &clock);
      RecordingCommunicator recording(&link);
      const SmallRun run{.options = automatic(KfacStrategy::kDpKfac, ns_per_byte), .values = {}};
      CORTADO_ASSIGN_OR_RETURN(const auto kfac, Kfac::create(small_job(), run.options, &recording, &clock));
      std::vector<std::string> codecs;
      for (int step = 0; step < 2 + kRound + 1; ++step) {
        if (step == 2) {
          const KfacState state = kfac->save_state();
          CORTADO_RETURN_IF_ERROR(kfac->load_state(std::span(&state, 1)).status());
          recording.clear();
        }
        CORTADO_RETURN_IF_ERROR(run_step(*kfac, run, communicator.rank(), step).status());
        if (step == 2) {
          EXPECT_EQ(recording.log().size(), ns_per_byte == 1 ? 4u : 5u);
        }
        codecs.push_back(kfac->report().choices[0].codec == "none" ? "none" : "codec");
      }
      if (ns_per_byte == 1) {
        EXPECT_EQ(codecs, std::vector<std::string>(codecs.size(), "none"));
      } else {
        EXPECT_EQ(codecs, (std::vector<std::string>{"codec", "codec", "codec", "codec", "codec", "none", "none", "none",
                                                    "codec"}));
      }
      return {};
    });
    for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  }
}

// On trial and afterwards: the second bound, of which the cluster has no times, takes the place of the first.
TEST(KfacAuto, WhatIsDecidedGoesOnWithOtherOptions) {
  for (const KfacStrategy strategy : {KfacStrategy::kCommOpt, KfacStrategy::kHybridOpt, KfacStrategy::kMemOpt}) {
    const std::vector<Status> statuses = run_ranks(4, [&](Communicator& communicator) -> Status {
      HandClock clock;
      TimedLink link(&communicator, communicator.rank(), slow(1000), &clock);
      SmallRun run{.options = automatic(strategy, 1000), .values = {}};
      run.options.candidates = {"compso(bound=0.004)"};
      CORTADO_ASSIGN_OR_RETURN(const auto kfac, Kfac::create(small_job(), run.options, &link, &clock));
      std::vector<std::string> reasons;
      for (int step = 0; step < kOnTrial + 4; ++step) {
        const bool is_later = (step > 0 && step < kOnTrial) || step > kOnTrial + 1;
        const std::string codec = is_later ? "compso(bound=0.02)" : "compso(bound=0.004)";
        CORTADO_RETURN_IF_ERROR(kfac->set_candidates({codec}));
        CORTADO_RETURN_IF_ERROR(run_step(*kfac, run, communicator.rank(), step).status());
        if (step >= kRound && step < kOnTrial) continue;  // some kinds are decided, others on trial
        for (const KfacChoice& choice : kfac->report().choices) {
          const bool compresses = step >= kOnTrial || is_compressed_on_trial(step);
          EXPECT_EQ(choice.codec, compresses ? codec : "none") << step << ", " << choice.message;
          if (step == kOnTrial) reasons.push_back(choice.reason);
          EXPECT_EQ(choice.measured_ns > 0, step >= kOnTrial) << step << ", " << choice.message;
        }
      }
      for (std::size_t c = 0; c < reasons.size(); ++c) EXPECT_EQ(kfac->report().choices[c].reason, reasons[c]);
      return {};
    });
    for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  }
}

// The message that a NaN keeps from being decided anew, too.
TEST(KfacAuto, NoMessageGoesWithACandidateOfBefore) {
  const std::vector<Status> statuses = run_ranks(4, [&](Communicator& communicator) -> Status {
    SmallRun run{.options = automatic(KfacStrategy::kDpKfac, 1000), .values = {}};
    run.options.candidates = {"compso(bound=0.004)"};
    CORTADO_ASSIGN_OR_RETURN(const auto kfac, Kfac::create(small_job(), run.options, &communicator));
    CORTADO_RETURN_IF_ERROR(run_step(*kfac, run, communicator.rank(), 0).status());
    const KfacState state = kfac->save_state();
    CORTADO_RETURN_IF_ERROR(kfac->load_state(std::span(&state, 1)).status());  // to be decided anew
    CORTADO_RETURN_IF_ERROR(kfac->set_candidates({"compso(bound=0.02)"}));
    Gradients gradients = gradients_of(kfac->layers(), 4, -1, 0);
    gradients[2][1] = NAN;
    CORTADO_RETURN_IF_ERROR(kfac->step({}, addresses_of(kfac->layers(), &gradients)).status());
    EXPECT_EQ(kfac->report().choices[0].codec, "compso(bound=0.02)");
    return {};
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST(KfacAuto, CandidatesAreComparedOverRanks) {
  const std::vector<Status> statuses = run_ranks(4, [&](Communicator& communicator) -> Status {
    SmallRun run{.options = automatic(KfacStrategy::kMemOpt, 1000), .values = {}};
    run.options.candidates = {"compso(bound=0.004)"};
    CORTADO_ASSIGN_OR_RETURN(const auto kfac, Kfac::create(small_job(), run.options, &communicator));
    EXPECT_EQ(kfac->set_candidates({"compso(bound=0.02)", "sign"}).message(),
              "expected as many candidates as at first, 1, got 2");
    EXPECT_EQ(kfac->set_candidates({"quant(bits=8)"}).message(),
              "candidate 0 was compso(bound=0.004) at first and must stay compso, got quant(bits=8)");
    EXPECT_EQ(kfac->set_candidates({"compso(bound=-1)"}).code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(kfac->set_candidates({"acp(rank=2)"}).code(), StatusCode::kUnsupported);
    const bool differs = communicator.rank() == 1;
    CORTADO_RETURN_IF_ERROR(kfac->set_candidates({differs ? "compso(bound=0.02)" : "compso(bound=0.004)"}));
    return run_step(*kfac, run, communicator.rank(), 0).status();
  });
  for (const Status& status : statuses) {
    EXPECT_EQ(status.code(), StatusCode::kMismatch) << status.to_string();
    EXPECT_NE(status.message().find("step 0"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("rank 1 has \"gradients auto, factors auto, candidate compso(bound=0.02)\""),
              std::string::npos)
        << status.message();
  }
}

TEST(KfacAuto, OnlyAutoHasCandidates) {
  const std::vector<Status> statuses = run_ranks(4, [&](Communicator& communicator) -> Status {
    KfacOptions options = automatic(KfacStrategy::kMemOpt, 1000);
    options.gradients.codec = options.factor_compression = "sign";
    CORTADO_ASSIGN_OR_RETURN(const auto kfac, Kfac::create(small_job(), options, &communicator));
    return kfac->set_candidates({"sign"});
  });
  for (const Status& status : statuses) EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition) << status.to_string();
}

TEST(KfacAuto, TheCodecThatItChoosesCanNotBeSet) {
  const std::vector<Status> statuses = run_ranks(4, [&](Communicator& communicator) -> Status {
    CORTADO_ASSIGN_OR_RETURN(const auto kfac,
                             Kfac::create(small_job(), automatic(KfacStrategy::kMemOpt, 1), &communicator));
    EXPECT_EQ(kfac->set_compression("sign").code(), StatusCode::kFailedPrecondition);
    EXPECT_EQ(kfac->set_factor_compression("none").code(), StatusCode::kFailedPrecondition);
    return {};
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
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

  for (const double min_gain : {-0.1, 1.0, std::numeric_limits<double>::quiet_NaN()}) {
    options = automatic(KfacStrategy::kMemOpt, 1);
    options.min_gain = min_gain;
    for (const Status& status : statuses_of(options)) {
      EXPECT_NE(status.message().find("min_gain must be from 0 to less than 1, got "), std::string::npos)
          << status.message();
    }
  }

  // Some would keep what others give up.
  const auto gains = run_ranks(4, [](Communicator& communicator) {
    KfacOptions one = automatic(KfacStrategy::kMemOpt, 1);
    one.min_gain = communicator.rank() == 1 ? 1.0 : 0.05;
    return Kfac::create(small_job(), one, &communicator).status();
  });
  for (const Status& status : gains) EXPECT_EQ(status.code(), StatusCode::kMismatch) << status.to_string();

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
