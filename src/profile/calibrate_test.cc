// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/calibrate.h"

#include <gtest/gtest.h>

#include <chrono>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "collective/late_communicator_testing.h"
#include "collective/passing_communicator_testing.h"
#include "collective/rank_threads.h"
#include "core/check.h"
#include "profile/calibrator.h"

namespace cortado {
namespace {

CalibrateOptions quick() {
  return {.codecs = {"cast(bf16)", "topk(density=0.01)"}, .budget_s = 0.5, .max_bytes = 1 << 18, .max_elems = 1 << 16};
}

std::vector<Cluster> calibrate_ranks(int ranks, const CalibrateOptions& options, const Clock* clock = steady_clock()) {
  std::vector<Cluster> clusters(static_cast<std::size_t>(ranks));
  const std::vector<Status> statuses = run_ranks(ranks, [&](Communicator& communicator) -> Status {
    CORTADO_ASSIGN_OR_RETURN(clusters[static_cast<std::size_t>(communicator.rank())],
                             calibrate(&communicator, options, clock));
    return {};
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  return clusters;
}

// Caches would keep one array; casts keep nothing of what they lose.
TEST(Calibrate, EveryCodingTakesOtherArrays) {
  constexpr std::int64_t kElems = 1024;
  for (const auto& [spec, expected] : {std::pair{"topk(density=0.01)", 3}, std::pair{"cast(bf16)", 0}}) {
    CpuArrays arrays(kElems);
    EXPECT_EQ(arrays.gradients.size(), 8u * kElems);
    const std::unique_ptr<Codec> codec = make_codec(spec).value();
    const std::unique_ptr<CodecWork> work = make_cpu_work(*codec, kElems, arrays);
    for (int coding = 0; coding < 3; ++coding) {
      ASSERT_TRUE(work->encode().ok());
      ASSERT_TRUE(work->decode().ok());
    }
    const auto used = [](const AlignedBuffer<float>& buffer) {
      int arrays_used = 0;
      for (std::size_t at = 0; at < buffer.size(); at += kElems) {
        arrays_used += std::any_of(buffer.begin() + at, buffer.begin() + at + kElems, [](float v) { return v != 0; });
      }
      return arrays_used;
    };
    EXPECT_EQ(used(arrays.gradients), 8) << spec;
    EXPECT_EQ(used(arrays.residuals), expected) << spec;
    EXPECT_EQ(used(arrays.outputs), 3) << spec;
  }
  EXPECT_EQ(CpuArrays(1 << 22).gradients.size(), std::size_t{1} << 23);
}

TEST(Calibrate, AllRanksGetTheSameFile) {
  const std::vector<Cluster> clusters = calibrate_ranks(3, quick());
  const std::string json = cluster_to_json(clusters[0]);
  for (const Cluster& cluster : clusters) EXPECT_EQ(cluster_to_json(cluster), json);
  const Result<Cluster> again = cluster_from_json(json);
  ASSERT_TRUE(again.ok()) << again.status().to_string();
  EXPECT_EQ(cluster_to_json(again.value()), json);
}

TEST(Calibrate, MeasuresEveryCollectiveOfEveryLevelAndEveryCodec) {
  CalibrateOptions options = quick();
  options.topology = Topology::two_levels(4, 2).value();
  options.transport_version = "test 1";
  const Cluster cluster = calibrate_ranks(4, options)[0];
  ASSERT_EQ(cluster.levels.size(), 2u);
  ASSERT_EQ(cluster.ranges.size(), 1u);
  EXPECT_EQ(cluster.ranges[0].levels, (LevelRange{0, 1}));
  for (const CollectiveCurves* curves :
       {&cluster.levels[0].collectives, &cluster.levels[1].collectives, &cluster.ranges[0].collectives}) {
    EXPECT_EQ(curves->size(), 7u);
    for (const auto& [kind, curve] : *curves) EXPECT_GE(curve.sizes.size(), 2u) << op_kind_name(kind);
  }
  // Two ranks of a machine share the outer link.
  EXPECT_EQ(cluster.levels[1].collectives.at(OpKind::kAllReduce).sizes[0],
            2 * cluster.levels[0].collectives.at(OpKind::kAllReduce).sizes[0]);
  EXPECT_EQ(cluster.codecs.size(), 4u);
  EXPECT_EQ(cluster.communicator, "local, test 1");
  EXPECT_NE(cluster.fingerprint.find("4 ranks on "), std::string::npos) << cluster.fingerprint;
  EXPECT_NE(cluster_to_json(cluster).find("spread_ns"), std::string::npos);
}

TEST(Calibrate, AllRanksOfAMachineAndOfASiteShareTheLinkOutOfIt) {
  CalibrateOptions options = quick();
  options.collectives = {OpKind::kAllReduce};
  options.codecs = {};
  options.contention = false;
  options.topology = Topology{{{"intra", 2}, {"inter", 2}, {"wan", 2}}};
  const Cluster cluster = calibrate_ranks(8, options)[0];
  const auto smallest = [&](std::size_t level) {
    return cluster.levels.at(level).collectives.at(OpKind::kAllReduce).sizes.at(0);
  };
  EXPECT_EQ(smallest(1), 2 * smallest(0));
  EXPECT_EQ(smallest(2), 4 * smallest(0));
}

// A clock that goes on by the same time at each look: the numbers are known.
class CountingClock final : public Clock {
 public:
  std::int64_t now_ns() const override { return now_ += 1000; }

 private:
  mutable std::int64_t now_ = 0;
};

TEST(Calibrate, TakesMediansAndSaysHowManyRuns) {
  CalibrateOptions options = quick();
  options.collectives = {OpKind::kAllReduce};
  options.codecs = {};
  CountingClock clock;
  const Cluster cluster = calibrate_ranks(1, options, &clock)[0];
  const TimeCurve& curve = cluster.levels[0].collectives.at(OpKind::kAllReduce);
  EXPECT_EQ(curve.sizes, (std::vector<std::int64_t>{4096, 65536, 1 << 18}));
  // Twice four at once in a run, and once.
  EXPECT_EQ(curve.times_ns, (std::vector<std::int64_t>{125, 250, 250}));
  const std::string& runs = cluster.levels[0].unknown.at("/collectives/all_reduce/runs");
  EXPECT_EQ(runs.substr(0, 3), "[15");
}

// One rank whose collectives take a known time on a clock that nothing else moves.
class SlowLink final : public PassingCommunicator, public Clock {
 public:
  SlowLink(Communicator* inner, std::int64_t ns_per_byte, std::int64_t latency_ns = 10'000)
      : PassingCommunicator(inner), ns_per_byte_(ns_per_byte), latency_ns_(latency_ns) {}

  std::int64_t now_ns() const override { return now_ns_; }
  std::string name() const override { return "slow"; }
  Result<WorkId> start(const CollectiveCall& call) override {
    now_ns_ += latency_ns_ + call.elems * static_cast<std::int64_t>(dtype_bytes(call.dtype)) * ns_per_byte_;
    return inner_->start(call);
  }

 private:
  std::int64_t ns_per_byte_, latency_ns_;
  std::int64_t now_ns_ = 0;
};

// All-reduces that take `latency` and 300 ns a byte, of float16 thrice that, from their start on, or from the wait on:
// then nothing travels beside computation.
class TimedLink final : public PassingCommunicator {
 public:
  TimedLink(Communicator* inner, std::chrono::milliseconds latency, bool only_in_wait)
      : PassingCommunicator(inner), latency_(latency), only_in_wait_(only_in_wait) {}

  Result<WorkId> start(const CollectiveCall& call) override {
    is_timed_ = call.kind == CollectiveKind::kAllReduce;
    const std::int64_t ns_per_byte = call.dtype == DType::kFloat16 ? 900 : 300;
    time_ = latency_ +
            std::chrono::nanoseconds(ns_per_byte * call.elems * static_cast<std::int64_t>(dtype_bytes(call.dtype)));
    started_ = std::chrono::steady_clock::now();
    return inner_->start(call);
  }
  Status wait(WorkId work, std::chrono::nanoseconds timeout) override {
    if (is_timed_) std::this_thread::sleep_until((only_in_wait_ ? std::chrono::steady_clock::now() : started_) + time_);
    return inner_->wait(work, timeout);
  }

 private:
  std::chrono::milliseconds latency_;
  std::chrono::nanoseconds time_{};
  bool only_in_wait_, is_timed_ = false;
  std::chrono::steady_clock::time_point started_;
};

TEST(Calibrate, StaysWithinItsBudget) {
  const auto calibrated = [](std::int64_t ns_per_byte, double budget_s) {
    CalibrateOptions options = quick();
    options.codecs = {};
    options.max_bytes = 1 << 24;
    options.budget_s = budget_s;
    LocalGroup group(1);
    SlowLink link(group.communicator(0), ns_per_byte);
    const Cluster cluster = calibrate(&link, options, &link).value();
    EXPECT_LE(link.now_ns(), budget_s * 1e9) << ns_per_byte << " ns a byte";
    EXPECT_GE(link.now_ns(), 0.5 * budget_s * 1e9) << ns_per_byte << " ns a byte";
    const CollectiveCurves& curves = cluster.levels[0].collectives;
    EXPECT_EQ(curves.at(OpKind::kAllGather).sizes.back(), curves.at(OpKind::kAllReduce).sizes.back());
    return curves.at(OpKind::kAllReduce).sizes;
  };
  EXPECT_EQ(calibrated(1, 1), (std::vector<std::int64_t>{4096, 65536, 1 << 20, 1 << 24}));
  // A run of the third size would take a tenth of all; of a quarter of it, a fortieth.
  EXPECT_EQ(calibrated(100, 1), (std::vector<std::int64_t>{4096, 65536, 1 << 18}));
  EXPECT_EQ(calibrated(100, 20), (std::vector<std::int64_t>{4096, 65536, 1 << 20, 1 << 22}));
}

// 8 Mb/s: a run of 4 MiB takes 4.2 s. Sizes that links need are measured when the budget has been spent, too, but it is
// less than a minute in all.
TEST(Calibrate, TakesLessThanAMinuteByDefault) {
  CalibrateOptions options;
  options.codecs = {};
  options.max_bytes = 1 << 24;
  LocalGroup group(1);
  SlowLink link(group.communicator(0), 1000);
  const Cluster cluster = calibrate(&link, options, &link).value();
  EXPECT_LT(link.now_ns(), 60e9);
  EXPECT_EQ(cluster.levels[0].collectives.at(OpKind::kAllReduce).sizes,
            (std::vector<std::int64_t>{4096, 65536, 1 << 20, 1 << 22}));
}

// However slow the link is, as long as two sizes of everything fit.
TEST(Calibrate, TakesLittleMoreThanAMinuteOverAnyLink) {
  for (const std::int64_t ns_per_byte : {1, 8, 80, 800, 8000}) {
    CalibrateOptions options;
    options.codecs = {};
    LocalGroup group(1);
    SlowLink link(group.communicator(0), ns_per_byte);
    ASSERT_TRUE(calibrate(&link, options, &link).ok());
    EXPECT_LT(link.now_ns(), 61e9) << ns_per_byte;
  }
}

// Two transfers of the largest size would take half of it again.
TEST(Calibrate, TransfersAtOnceStayWithinTheBudget) {
  CalibrateOptions options = quick();
  options.collectives = {OpKind::kAllGather};
  options.codecs = {};
  options.max_bytes = 1 << 24;
  options.budget_s = 20;
  options.topology = Topology::two_levels(2, 1).value();
  const std::vector<Status> statuses = run_ranks(2, [&](Communicator& communicator) -> Status {
    SlowLink link(&communicator, 2000);  // the same time on both ranks
    CORTADO_ASSIGN_OR_RETURN(const Cluster cluster, calibrate(&link, options, &link));
    EXPECT_EQ(cluster.levels[0].overlap_time_share, 1);
    EXPECT_EQ(cluster.levels[0].collectives.at(OpKind::kAllGather).sizes.back(), 1 << 20);
    EXPECT_LE(link.now_ns(), options.budget_s * 1e9);
    return {};
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

// The first collective takes all of the time; what comes after it must not promise that bytes cost nothing.
TEST(Calibrate, ACurveThatEndsWithLatencyGoesOnAsAllReducesDo) {
  // What a gather takes, up to 65536 bytes, where an all-reduce takes 6.2 ms; and what is made of that for 1 MiB.
  for (const auto& [own_ns, continued_ns] :
       {std::pair(1'000'000, 45'000'000), std::pair(4'000'000, 57'692'307), std::pair(9'000'000, 90'000'000)}) {
    CalibrateOptions options = quick();
    options.codecs = {};
    options.max_bytes = 1 << 24;
    options.budget_s = 0.02;
    options.collectives = {OpKind::kAllReduce, OpKind::kAllGather};
    LocalGroup group(1);
    SlowLink link(group.communicator(0), 0, own_ns);
    Cluster known = calibrate(&link, options, &link).value();
    known.levels[0].collectives = {{OpKind::kAllReduce, {{4096, 65536, 1 << 20}, {1'000'000, 6'240'000, 90'000'000}}}};
    known.levels[0].unknown.clear();
    options.known = known;
    const TimeCurve gather = calibrate(&link, options, &link).value().levels[0].collectives.at(OpKind::kAllGather);
    EXPECT_EQ(gather.sizes, (std::vector<std::int64_t>{4096, 65536, 1 << 20}));
    EXPECT_EQ(gather.times_ns[1], own_ns);
    EXPECT_EQ(gather.times_ns[2], continued_ns);
  }
}

// The dev preset's AddressSanitizer watches the buffers, which are as large as the largest size.
TEST(Calibrate, NoSizeIsBeyondTheLargest) {
  for (const auto& [max_bytes, max_elems] :
       {std::pair(4096, 1024), std::pair(5000, 1500), std::pair(16384, 5000), std::pair(65535, 16383)}) {
    CalibrateOptions options = quick();
    options.max_bytes = max_bytes;
    options.max_elems = max_elems;
    const Cluster cluster = calibrate_ranks(2, options)[0];
    for (const auto& [kind, curve] : cluster.levels[0].collectives) {
      EXPECT_EQ(curve.sizes.size(), 2u) << op_kind_name(kind);
      EXPECT_LE(curve.sizes.back(), max_bytes) << op_kind_name(kind);
      EXPECT_GE(curve.sizes.back(), max_bytes - 8) << op_kind_name(kind);
    }
    for (const CodecTimes& times : cluster.codecs) {
      EXPECT_EQ(times.curve.sizes.size(), 2u) << times.codec;
      EXPECT_LE(times.curve.sizes.back(), max_elems) << times.codec;
    }
  }
}

// Passes with bases of more columns than a small matrix has, too.
TEST(Calibrate, LowRankIsTimedAtEverySize) {
  CalibrateOptions options = quick();
  options.codecs = {"acp(rank=4)", "acp(rank=100)", "power(rank=4)"};
  options.max_elems = 1 << 14;
  const Cluster cluster = calibrate_ranks(2, options)[0];
  ASSERT_EQ(cluster.codecs.size(), 6u);
  for (const CodecTimes& times : cluster.codecs) {
    EXPECT_GE(times.curve.sizes.size(), 2u) << times.codec;
    for (const std::int64_t ns : times.curve.times_ns) EXPECT_GT(ns, 0) << times.codec;
  }
}

TEST(Calibrate, TellsHowFarItIs) {
  CalibrateOptions options = quick();
  double last = 0;
  int calls = 0;
  options.progress = [&](double done, const std::string& next) {
    EXPECT_GE(done, last);
    EXPECT_TRUE(done == 1 || !next.empty());
    last = done;
    ++calls;
  };
  calibrate_ranks(1, options);
  EXPECT_EQ(last, 1);
  EXPECT_GT(calls, 10);
}

TEST(Calibrate, MeasuresContentionIfAskedTo) {
  for (const bool asked : {true, false}) {
    CalibrateOptions options = quick();
    options.collectives = {OpKind::kAllReduce};
    options.contention = asked;
    bool measured = false;
    options.progress = [&](double, const std::string& next) {
      measured = measured || next.starts_with("matrix product");
    };
    const Cluster cluster = calibrate_ranks(1, options)[0];
    EXPECT_EQ(measured, asked);
    EXPECT_TRUE(asked || cluster.cpu_codec_slows_backward == 0);
  }
}

TEST(Calibrate, ContentionIsMeasuredBesideTheSlowestCodec) {
  CalibrateOptions options = quick();
  options.collectives = {OpKind::kAllReduce};
  for (const auto& codecs : {std::vector<std::string>{"none", "topk(density=0.01)"}, {"topk(density=0.01)", "none"}}) {
    options.codecs = codecs;
    EXPECT_EQ(calibrate_ranks(1, options)[0].cpu_codec, canonical_codec("topk(density=0.01)"));
  }
}

// "topk" and "topk(density=0.01)" are one codec, whoever has written the file.
TEST(Calibrate, CodecsHaveOneSpelling) {
  CalibrateOptions options = quick();
  options.collectives = {OpKind::kAllReduce};
  options.codecs = {"topk(density=0.01)"};
  Cluster known = calibrate_ranks(1, options)[0];
  ASSERT_EQ(known.codecs.size(), 2u);
  for (CodecTimes& times : known.codecs) {
    EXPECT_EQ(times.codec, canonical_codec("topk"));
    times.codec = "topk";
    times.curve.times_ns.back() += 12345;
  }
  options.known = known;
  const Cluster again = calibrate_ranks(1, options)[0];
  ASSERT_EQ(again.codecs.size(), 2u);
  for (std::size_t c = 0; c < 2; ++c) {
    EXPECT_EQ(again.codecs[c].codec, canonical_codec("topk"));
    EXPECT_EQ(again.codecs[c].curve.times_ns, known.codecs[c].curve.times_ns) << "it is known";
  }
}

TEST(Calibrate, CodecsOfAFileThatAreNotHereAreNotTried) {
  CalibrateOptions options = quick();
  options.collectives = {OpKind::kAllReduce};
  options.contention = false;
  Cluster known = calibrate_ranks(1, options)[0];
  ASSERT_FALSE(known.codecs.empty());
  CodecTimes foreign = known.codecs[0];
  foreign.codec = "of_another_version(bits=3)";
  foreign.curve.times_ns.assign(foreign.curve.sizes.size(), 1'000'000'000'000);
  for (const OpKind direction : {OpKind::kEncode, OpKind::kDecode}) {
    foreign.direction = direction;
    known.codecs.push_back(foreign);
  }
  options.contention = true;
  options.known = known;
  const Cluster again = calibrate_ranks(1, options)[0];
  EXPECT_EQ(again.codecs.size(), known.codecs.size());
  EXPECT_FALSE(again.cpu_codec.empty());
  EXPECT_NE(again.cpu_codec, foreign.codec);
}

// Where none can be run beside computation, what the file says of another one stays.
TEST(Calibrate, AFileOfACodecThatIsNotHereNeedsNone) {
  CalibrateOptions options = quick();
  options.collectives = {OpKind::kAllReduce};
  options.codecs = {};
  Cluster known = calibrate_ranks(1, options)[0];
  ASSERT_TRUE(known.codecs.empty());
  known.cpu_codec = "of_another_version(bits=3)";
  known.cpu_codec_slows_backward = 0.375;
  options.known = known;
  const Cluster again = calibrate_ranks(1, options)[0];
  EXPECT_EQ(again.cpu_codec, known.cpu_codec);
  EXPECT_EQ(again.cpu_codec_slows_backward, 0.375);
}

TEST(Calibrate, MeasuresPackingForPlans) {
  CalibrateOptions options = quick();
  const Cluster cluster = calibrate_ranks(2, options)[0];
  for (const TimeCurve* curve : {&cluster.pack, &cluster.unpack}) {
    ASSERT_GE(curve->sizes.size(), 2u);
    EXPECT_EQ(curve->sizes.front(), 1024);
    EXPECT_GT(curve->times_ns.back(), 0);
  }
  for (const char* field : {"/copies/pack/spread_ns", "/copies/pack/runs", "/copies/unpack/runs"}) {
    EXPECT_TRUE(cluster.unknown.contains(field)) << field;
  }
  EXPECT_EQ(cluster_to_json(cluster_from_json(cluster_to_json(cluster)).value()), cluster_to_json(cluster));
  options.codecs = {};  // then there is nothing to plan
  EXPECT_TRUE(calibrate_ranks(2, options)[0].pack.sizes.empty());
  options = quick();
  options.known = cluster;
  options.known->pack.times_ns.assign(cluster.pack.sizes.size(), 123456789);
  EXPECT_EQ(calibrate_ranks(2, options)[0].pack.times_ns, options.known->pack.times_ns);
  options.known->unpack = {};
  std::erase_if(options.known->unknown, [](const auto& field) { return field.first.starts_with("/copies/unpack"); });
  const Cluster again = calibrate_ranks(2, options)[0];
  EXPECT_EQ(again.pack.times_ns, options.known->pack.times_ns);
  EXPECT_FALSE(again.unpack.sizes.empty());
}

TEST(Calibrate, MeasuresTwoTransfersAtOnce) {
  CalibrateOptions options = quick();
  options.topology = Topology::two_levels(4, 2).value();
  const Cluster cluster = calibrate_ranks(4, options)[0];
  for (const ClusterLevel& level : cluster.levels) {
    ASSERT_TRUE(level.overlap_time_share.has_value()) << level.name;
    EXPECT_GT(*level.overlap_time_share, 0);
  }
  options.contention = false;
  EXPECT_FALSE(calibrate_ranks(4, options)[0].levels[0].overlap_time_share.has_value());
}

// On two ranks, over a TimedLink.
Cluster calibrate_timed(const CalibrateOptions& options, std::chrono::milliseconds latency, bool only_in_wait) {
  Cluster clusters[2];
  const std::vector<Status> statuses = run_ranks(2, [&](Communicator& communicator) -> Status {
    TimedLink link(&communicator, latency, only_in_wait);
    CORTADO_ASSIGN_OR_RETURN(clusters[communicator.rank()], calibrate(&link, options));
    return {};
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  EXPECT_EQ(clusters[0].transfers_slow_backward, clusters[1].transfers_slow_backward);
  return clusters[0];
}

CalibrateOptions only_transfers() {
  CalibrateOptions options = quick();
  options.collectives = {OpKind::kAllReduce};
  options.codecs = {};
  options.max_bytes = 65536;
  options.topology = Topology::two_levels(2, 1).value();
  options.budget_s = 2;
  return options;
}

TEST(Calibrate, BuffersOfACollectiveWhoseEndWasNotSeenAreKept) {
  for (const std::string during :
       {"all_reduce@", "two of all_reduce@all in turn", "two of all_reduce@all at once", "of fp16", "bytes alone",
        "computation beside all_reduce", "starts of all_reduce beside"}) {
    bool came_there = false;  // where the machine is busy, latency seems to be all that there is to measure
    for (int attempt = 0; attempt < 5 && !came_there; ++attempt) {
      bool came[2] = {};
      const std::vector<Status> statuses = run_ranks(2, [&](Communicator& communicator) -> Status {
        TimedLink link(&communicator, std::chrono::milliseconds(0), false);
        LateCommunicator transport(&link);
        CalibrateOptions options = only_transfers();
        bool& came_here = came[communicator.rank()];
        options.progress = [&](double, const std::string& what) {
          if (what.find(during) == std::string::npos) return;
          transport.be_late();
          came_here = true;
        };
        const Status status = calibrate(&transport, options).status();
        const std::size_t kept = transport.go_on();
        EXPECT_EQ(kept > 0, came_here) << during;
        return status;
      });
      came_there = came[0] && came[1];
      for (const Status& status : statuses) {
        EXPECT_EQ(status.code(), came_there ? StatusCode::kTimeout : StatusCode::kOk)
            << during << ": " << status.to_string();
      }
    }
    EXPECT_TRUE(came_there) << during;
  }
}

TEST(Calibrate, MeasuresHowMuchLongerSumsOfSixteenBitsTake) {
  CalibrateOptions options = only_transfers();
  options.contention = false;
  Cluster cluster;
  bool is_near = false;
  for (int attempt = 0; attempt < 5 && !is_near; ++attempt) {  // about 3 and 1.1, where nothing else runs
    cluster = calibrate_timed(options, std::chrono::milliseconds(0), false);
    const ClusterLevel& level = cluster.levels.back();
    is_near = std::abs(level.float16_sum_factor.value_or(0) - 3) < 0.6 &&
              std::abs(level.bfloat16_sum_factor.value_or(0) - 1.1) < 0.1001;  // never below 1
  }
  EXPECT_TRUE(is_near) << cluster.levels.back().float16_sum_factor.value_or(0) << " "
                       << cluster.levels.back().bfloat16_sum_factor.value_or(0);
  // What is known is kept, and what is mostly latency tells nothing.
  cluster.levels.back().float16_sum_factor = 7;
  cluster.levels.back().bfloat16_sum_factor.reset();
  options.known = cluster;
  EXPECT_EQ(calibrate_timed(options, std::chrono::milliseconds(0), false).levels.back().float16_sum_factor, 7);
  options.known.reset();
  options.max_bytes = 4096;
  EXPECT_FALSE(
      calibrate_timed(options, std::chrono::milliseconds(20), false).levels.back().float16_sum_factor.has_value());
}

TEST(Calibrate, MeasuresWhatTransfersTakeFromComputation) {
  using std::chrono::milliseconds;
  CalibrateOptions options = only_transfers();
  // What travels only while it is waited for takes all from computation: about 1 and 0, where nothing else runs.
  bool is_more = false;
  for (int attempt = 0; attempt < 5 && !is_more; ++attempt) {
    const std::optional<double> beside = calibrate_timed(options, milliseconds(0), false).transfers_slow_backward;
    const std::optional<double> in_wait = calibrate_timed(options, milliseconds(0), true).transfers_slow_backward;
    if (!beside.has_value() || !in_wait.has_value()) continue;
    EXPECT_GE(*beside, 0);
    EXPECT_LE(*in_wait, 1);
    is_more = *in_wait > *beside;
  }
  EXPECT_TRUE(is_more);

  options.known = calibrate_timed(options, milliseconds(0), false);
  options.known->transfers_slow_backward = 0.375;
  EXPECT_EQ(calibrate_timed(options, milliseconds(0), false).transfers_slow_backward, 0.375);
  // A file of before it was measured: there is all of the budget for it, of which a twelfth is enough.
  options.known->transfers_slow_backward.reset();
  const TimeCurve as_on_the_link = {.sizes = {4096, 65536}, .times_ns = {1'228'800, 19'660'800}};
  for (ClusterLevel& level : options.known->levels) level.collectives[OpKind::kAllReduce] = as_on_the_link;
  for (ClusterRange& range : options.known->ranges) range.collectives[OpKind::kAllReduce] = as_on_the_link;
  options.budget_s = 0.5;
  EXPECT_TRUE(calibrate_timed(options, milliseconds(0), false).transfers_slow_backward.has_value());
}

// Not only sizes of the curve, which are far apart: a sixteenth of its largest is what fits here.
TEST(Calibrate, TimesTransfersOfTheLargestSizeThatFits) {
  CalibrateOptions options = only_transfers();
  options.known = calibrate_timed(options, std::chrono::milliseconds(0), false);
  options.known->transfers_slow_backward.reset();
  const TimeCurve as_on_the_link = {.sizes = {4096, 1 << 20}, .times_ns = {1'228'800, 314'572'800}};
  for (ClusterLevel& level : options.known->levels) level.collectives[OpKind::kAllReduce] = as_on_the_link;
  for (ClusterRange& range : options.known->ranges) range.collectives[OpKind::kAllReduce] = as_on_the_link;
  options.budget_s = 0.5;
  std::mutex mutex;
  std::set<std::string> timed;
  options.progress = [&](double, const std::string& what) {
    const std::lock_guard lock(mutex);
    timed.insert(what);
  };
  EXPECT_TRUE(calibrate_timed(options, std::chrono::milliseconds(0), false).transfers_slow_backward.has_value());
  EXPECT_TRUE(timed.contains("all_reduce of 65536 bytes alone"));
}

TEST(Calibrate, LeavesUnknownWhatTransfersTakeWhereItCannotTell) {
  const std::chrono::milliseconds none(0), latency(20);  // 65 KB take 20 ms
  CalibrateOptions options = only_transfers();
  EXPECT_FALSE(calibrate_timed(options, latency, false).transfers_slow_backward.has_value())
      << "latency takes the time";
  options.collectives = {OpKind::kAllGather};
  EXPECT_FALSE(calibrate_timed(options, none, false).transfers_slow_backward.has_value()) << "without all-reduce";
  options = quick();
  EXPECT_FALSE(calibrate_ranks(1, options)[0].transfers_slow_backward.has_value()) << "there is nobody to send to";
}

// One in four starts takes nine milliseconds, the others one: three in the mean, while the median is one.
TEST(Calibrate, MeasuresWhatStartsTakeOfAThreadThatComputes) {
  class SlowStarts final : public PassingCommunicator {
   public:
    using PassingCommunicator::PassingCommunicator;
    Result<WorkId> start(const CollectiveCall& call) override {
      const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(number_++ % 4 == 0 ? 9 : 1);
      while (std::chrono::steady_clock::now() < until) continue;
      return inner_->start(call);
    }

   private:
    int number_ = 0;
  };
  const auto measured = [](const CalibrateOptions& options) {
    std::optional<std::int64_t> starts_ns[2];
    const std::vector<Status> statuses = run_ranks(2, [&](Communicator& communicator) -> Status {
      SlowStarts slow(&communicator);
      CORTADO_ASSIGN_OR_RETURN(const Cluster cluster, calibrate(&slow, options));
      starts_ns[communicator.rank()] = cluster.collective_start_ns;
      return {};
    });
    for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
    EXPECT_EQ(starts_ns[0], starts_ns[1]);
    return starts_ns[0];
  };
  CalibrateOptions options = only_transfers();
  const std::optional<std::int64_t> starts_ns = measured(options);
  EXPECT_GE(starts_ns, 2'500'000);
  EXPECT_LE(starts_ns, 25'000'000);  // a busy machine
  options.known = calibrate_ranks(2, options)[0];
  options.known->collective_start_ns = 77;
  EXPECT_EQ(measured(options), 77);

  options.known.reset();
  options.contention = false;
  EXPECT_GE(measured(options), 2'500'000);
  options.collectives = {OpKind::kAllGather};
  EXPECT_FALSE(measured(options).has_value());
  EXPECT_FALSE(calibrate_ranks(1, quick())[0].collective_start_ns.has_value());
}

// Curves with times that no machine has stay, and are the only ones that are not measured.
TEST(Calibrate, KeepsWhatIsKnown) {
  CalibrateOptions options = quick();
  options.transport_version = "test 1";
  Cluster known = calibrate_ranks(2, options)[0];
  known.codecs[0].curve.times_ns.assign(known.codecs[0].curve.sizes.size(), 123456789);
  TimeCurve& gather = known.levels[0].collectives.at(OpKind::kGather);
  gather.times_ns.assign(gather.sizes.size(), 987654321);
  known.levels[0].collectives.erase(OpKind::kBroadcast);  // with what stands beside it
  std::erase_if(known.levels[0].unknown,
                [](const auto& field) { return field.first.find("broadcast") != std::string::npos; });
  known.levels[0].overlap_time_share = 0.625;
  // Where latency is most of an all-reduce these are left unknown, by chance, and would be measured now.
  known.levels[0].float16_sum_factor = known.levels[0].bfloat16_sum_factor = 1.5;
  std::erase_if(known.levels[0].unknown,
                [](const auto& field) { return field.first.find("sum_factor") != std::string::npos; });
  options.codecs.push_back("cast(fp16)");
  options.known = known;
  std::vector<std::string> lines, points;
  std::vector<Cluster> clusters(2);
  const auto calibrate_again = [&] {
    lines.clear();
    points.clear();
    const std::vector<Status> statuses = run_ranks(2, [&](Communicator& communicator) -> Status {
      CalibrateOptions own = options;
      if (communicator.rank() == 0) {
        own.note = [&](const std::string& line) { lines.push_back(line); };
        own.progress = [&](double, const std::string& next) { points.push_back(next); };
      } else {
        own.known.reset();  // that of rank 0 counts
        own.transport_version = "another";
      }
      CORTADO_ASSIGN_OR_RETURN(clusters[static_cast<std::size_t>(communicator.rank())], calibrate(&communicator, own));
      return {};
    });
    for (const Status& status : statuses) ASSERT_TRUE(status.ok()) << status.to_string();
  };
  ASSERT_NO_FATAL_FAILURE(calibrate_again());
  EXPECT_EQ(cluster_to_json(clusters[0]), cluster_to_json(clusters[1]));
  EXPECT_EQ(lines, (std::vector<std::string>{"keeps 10 of 13 curves, which are known; measures 3"}));
  const Cluster& again = clusters[0];
  EXPECT_EQ(again.codecs.size(), 6u);
  EXPECT_EQ(again.codecs[0].curve.times_ns, known.codecs[0].curve.times_ns);
  EXPECT_EQ(again.levels[0].collectives.at(OpKind::kGather).times_ns, gather.times_ns);
  EXPECT_EQ(again.levels[0].collectives.size(), 7u);
  EXPECT_EQ(again.levels[0].overlap_time_share, 0.625);
  EXPECT_FALSE(points.empty());
  for (const std::string& point : points) {
    const bool is_missing = point.find("broadcast") != std::string::npos || point.find("fp16") != std::string::npos ||
                            point.starts_with("matrix product") || point.empty();
    EXPECT_TRUE(is_missing) << point;
  }

  options.known = again;
  ASSERT_NO_FATAL_FAILURE(calibrate_again());
  EXPECT_EQ(points, (std::vector<std::string>{""}));  // nothing but the end
  options.transport_version = "test 2";
  ASSERT_NO_FATAL_FAILURE(calibrate_again());
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(lines[0].find("measures everything: $.host.communicator: expected \"local, test 2\""), 0u) << lines[0];
  EXPECT_NE(clusters[0].codecs[0].curve.times_ns[0], 123456789);
  EXPECT_EQ(clusters[0].communicator, "local, test 2");
}

TEST(Calibrate, RefusesWhatCanNotBe) {
  const std::vector<Status> statuses = run_ranks(1, [&](Communicator& communicator) -> Status {
    CalibrateOptions options = quick();
    options.budget_s = 0;
    EXPECT_EQ(calibrate(&communicator, options).status().message(),
              "calibrate: budget_s must be above 0 and at most 1e6, got 0");
    options = quick();
    options.max_bytes = 4095;
    EXPECT_EQ(calibrate(&communicator, options).status().message(),
              "calibrate: max_bytes must be from 4096 to 2^34, got 4095");
    options = quick();
    options.max_elems = 1023;
    EXPECT_EQ(calibrate(&communicator, options).status().message(),
              "calibrate: max_elems must be from 1024 to 2^34, got 1023");
    options = quick();
    options.codecs = {"cast(bf16)", "nonsense"};
    options.progress = [](double, const std::string& next) { ADD_FAILURE() << "measures " << next; };
    EXPECT_NE(calibrate(&communicator, options).status().message().find("nonsense"), std::string::npos);
    options.codecs = {"cast(bf16)"};
    options.collectives = {};
    EXPECT_EQ(calibrate(&communicator, options).status().message(),
              "calibrate: expected collectives to measure, got none");
    return {};
  });
  EXPECT_TRUE(statuses[0].ok());
}

TEST(Calibrate, FilesFromElsewhereAreRefused) {
  const ClusterIdentity here{.fingerprint = "2 ranks on A", .communicator = "mpi"};
  Cluster cluster;
  cluster.fingerprint = "2 ranks on A";
  cluster.communicator = "mpi";
  cluster.levels.push_back({.name = "all", .ranks = 2, .link = "", .collectives = {}, .unknown = {}});
  const Topology topology = cluster.topology();
  EXPECT_TRUE(check_cluster_is_of(cluster, here, topology).ok());
  cluster.fingerprint = "2 ranks on B";
  EXPECT_EQ(check_cluster_is_of(cluster, here, topology).message(),
            "$.host.fingerprint: expected \"2 ranks on A\", as here, got \"2 ranks on B\": the file was measured "
            "elsewhere");
  cluster.fingerprint = here.fingerprint;
  cluster.levels[0].ranks = 4;
  EXPECT_EQ(check_cluster_is_of(cluster, here, topology).code(), StatusCode::kMismatch);
}

TEST(CalibratorCurve, ASlowSpellAtASmallSizeDoesNotRaiseLargerOnes) {
  Curve curve;
  for (const auto& [size, ns] : {std::pair{4096, 8}, {65536, 30}, {1 << 20, 12}, {1 << 24, 90}}) {
    curve.add(size, {.median_ns = ns});
  }
  EXPECT_EQ(curve.times.times_ns, (std::vector<std::int64_t>{8, 12, 12, 90}));
}

}  // namespace
}  // namespace cortado
