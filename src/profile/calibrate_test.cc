// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/calibrate.h"

#include <gtest/gtest.h>

#include "collective/rank_threads.h"
#include "core/check.h"

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
  // Ten calls in a run, five, and one.
  EXPECT_EQ(curve.times_ns, (std::vector<std::int64_t>{100, 200, 1000}));
  const std::string& runs = cluster.levels[0].unknown.at("/collectives/all_reduce/runs");
  EXPECT_EQ(runs.substr(0, 3), "[15");
}

TEST(Calibrate, StaysWithinItsBudget) {
  CalibrateOptions options = quick();
  options.max_bytes = 1 << 24;
  options.budget_s = 1;
  const std::int64_t start_ns = steady_clock()->now_ns();
  calibrate_ranks(2, options);
  EXPECT_LT(steady_clock()->now_ns() - start_ns, 10'000'000'000);  // a busy machine may take its time
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
    options.codecs = {"nonsense"};
    EXPECT_NE(calibrate(&communicator, options).status().message().find("nonsense"), std::string::npos);
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
            "elsewhere; run cortado calibrate");
  cluster.fingerprint = here.fingerprint;
  cluster.levels[0].ranks = 4;
  EXPECT_EQ(check_cluster_is_of(cluster, here, topology).code(), StatusCode::kMismatch);
}

}  // namespace
}  // namespace cortado
