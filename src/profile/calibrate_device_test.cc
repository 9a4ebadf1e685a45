// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// calibrate() with a device, which is emulated here.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "collective/emulated_scheme_device.h"
#include "collective/rank_threads.h"
#include "cortado/calibrate.h"

namespace cortado {
namespace {

CalibrateOptions on_device(std::shared_ptr<const SchemeDevice> device = std::make_shared<EmulatedSchemeDevice>()) {
  return {.codecs = {"cast(bf16)", "topk(density=0.01)"},
          .collectives = {OpKind::kAllReduce},
          .device = std::move(device),
          .budget_s = 0.5,
          .max_bytes = 1 << 16,
          .max_elems = 1 << 14};
}

Cluster calibrated(const CalibrateOptions& options, int ranks = 1) {
  Cluster cluster;
  const std::vector<Status> statuses = run_ranks(ranks, [&](Communicator& communicator) -> Status {
    CORTADO_ASSIGN_OR_RETURN(Cluster own, calibrate(&communicator, options));
    if (communicator.rank() == 0) cluster = std::move(own);
    return {};
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  return cluster;
}

std::set<std::string> codecs_of(const Cluster& cluster, OpDevice device) {
  std::set<std::string> codecs;
  for (const CodecTimes& times : cluster.codecs) {
    if (times.device == device) codecs.insert(times.codec + " " + std::string(op_kind_name(times.direction)));
  }
  return codecs;
}

const std::string kTopk = canonical_codec("topk(density=0.01)");  // as files have it

TEST(CalibrateDevice, TimesCodecsThatHaveAVariantAndCopies) {
  CalibrateOptions options = on_device();
  options.codecs.push_back("topk(density=0.01) | quant(bits=4)");  // has none
  const Cluster cluster = calibrated(options, 2);
  EXPECT_EQ(codecs_of(cluster, OpDevice::kCpu).size(), 6u);
  EXPECT_EQ(codecs_of(cluster, OpDevice::kGpu),
            (std::set<std::string>{"cast(bf16) encode", "cast(bf16) decode", kTopk + " encode", kTopk + " decode"}));
  for (const CodecTimes& times : cluster.codecs) {
    EXPECT_GE(times.curve.sizes.size(), 2u) << times.codec;
    EXPECT_GT(times.curve.times_ns.front(), 0) << times.codec;
    EXPECT_TRUE(times.unknown.contains("/spread_ns")) << times.codec;
  }
  for (const TimeCurve* copies : {&cluster.host_to_device, &cluster.device_to_host}) {
    EXPECT_EQ(copies->sizes, (std::vector<std::int64_t>{4096, 65536}));
    EXPECT_GT(copies->times_ns.front(), 0);
  }
  EXPECT_TRUE(cluster.unknown.contains("/copies/host_to_device/runs"));
  EXPECT_EQ(cluster.gpu_codec, "") << "there was no computation";
  const std::string json = cluster_to_json(cluster);
  EXPECT_EQ(cluster_to_json(cluster_from_json(json).value()), json);
}

TEST(CalibrateDevice, NothingOfItWithoutADevice) {
  const Cluster cluster = calibrated(on_device(nullptr));
  EXPECT_TRUE(codecs_of(cluster, OpDevice::kGpu).empty());
  EXPECT_TRUE(cluster.host_to_device.sizes.empty());
  EXPECT_TRUE(cluster.device_to_host.sizes.empty());
}

// What was measured, with topk so slow that no noise makes another codec the slowest.
Cluster with_slow_topk(const CalibrateOptions& options) {
  Cluster known = calibrated(options);
  for (CodecTimes& each : known.codecs) {
    if (each.codec == kTopk) each.curve.times_ns.assign(each.curve.sizes.size(), 1'000'000'000);
  }
  return known;
}

// Notes that another thread than the one that made it gives it work, which that thread does late.
class WatchedQueue final : public EmulatedQueue {
 public:
  explicit WatchedQueue(std::atomic<bool>* is_shared) : is_shared_(is_shared) {}
  Status record(Event event) override {
    if (std::this_thread::get_id() != maker_ && !*is_shared_) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      *is_shared_ = true;
    }
    return EmulatedQueue::record(event);
  }

 private:
  std::atomic<bool>* is_shared_;
  std::thread::id maker_ = std::this_thread::get_id();
};

class WatchedDevice final : public EmulatedSchemeDevice {
 public:
  Result<std::unique_ptr<DeviceQueue>> make_queue() const override {
    return std::unique_ptr<DeviceQueue>(std::make_unique<WatchedQueue>(&is_shared));
  }
  mutable std::atomic<bool> is_shared = false;
};

// A computation that takes four times as long once another thread has encoded.
TEST(CalibrateDevice, MeasuresWhatTheSlowestCodecDoesToComputation) {
  const auto device = std::make_shared<WatchedDevice>();
  CalibrateOptions options = on_device(device);
  options.known = with_slow_topk(on_device());
  options.device_computation = [&]() -> Status {
    std::this_thread::sleep_for(std::chrono::milliseconds(device->is_shared ? 20 : 5));
    return {};
  };
  const Cluster cluster = calibrated(options);
  EXPECT_EQ(cluster.gpu_codec, kTopk);
  EXPECT_GT(cluster.gpu_codec_slows_backward, 0.5);
  EXPECT_LT(cluster.gpu_codec_slows_backward, 1);
  const std::string json = cluster_to_json(cluster);
  EXPECT_EQ(cluster_from_json(json).value().gpu_codec, cluster.gpu_codec);
  EXPECT_EQ(cluster_to_json(cluster_from_json(json).value()), json);
}

TEST(CalibrateDevice, AddsToAFileWithoutItAndKeepsWhatIsKnown) {
  CalibrateOptions options = on_device(nullptr);
  const Cluster without = calibrated(options);
  options = on_device();
  options.device_computation = [] { return Status(); };
  options.known = without;
  std::vector<std::string> lines, points;
  options.note = [&](const std::string& line) { lines.push_back(line); };
  options.progress = [&](double, const std::string& next) { points.push_back(next); };
  const Cluster with = calibrated(options);
  EXPECT_EQ(lines, (std::vector<std::string>{"keeps 5 of 9 curves, which are known; measures 4"}));
  EXPECT_EQ(with.codecs.size(), 8u);
  EXPECT_EQ(with.codecs[0].curve.times_ns, without.codecs[0].curve.times_ns);
  for (const std::string& point : points) {
    const bool is_of_device =
        point.find("the device") != std::string::npos || point.find("the host") != std::string::npos;
    EXPECT_TRUE(is_of_device || point.empty()) << point;
  }
  points.clear();
  options.known = with;
  const auto without_its_time = [](Cluster cluster) {
    cluster.unknown.erase("/calibration_ns");
    return cluster_to_json(cluster);
  };
  EXPECT_EQ(without_its_time(calibrated(options)), without_its_time(with));
  EXPECT_EQ(points, (std::vector<std::string>{""})) << "nothing but the end";
}

// ---- what can't be: an error on every rank, and no hang

// Nobody abandons the group for a rank that fails, as run_ranks() does for functions that return an error.
std::vector<Status> refusals(const std::function<CalibrateOptions(int rank)>& options_of) {
  std::vector<Status> statuses(3);
  run_ranks(3, [&](Communicator& communicator) {
    statuses[static_cast<std::size_t>(communicator.rank())] =
        calibrate(&communicator, options_of(communicator.rank())).status();
    return Status();
  });
  return statuses;
}

TEST(CalibrateDevice, CopiesInOneDirectionThatAreKnownStay) {
  CalibrateOptions options = on_device();
  Cluster known = calibrated(options);
  known.host_to_device.times_ns.assign(known.host_to_device.sizes.size(), 123456789);
  known.device_to_host = {};
  std::erase_if(known.unknown, [](const auto& field) { return field.first.starts_with("/copies/device_to_host"); });
  options.known = known;
  const Cluster again = calibrated(options);
  EXPECT_EQ(again.host_to_device.times_ns, known.host_to_device.times_ns);
  EXPECT_FALSE(again.device_to_host.sizes.empty());
}

// A codec of the file that has times on a device, but no variant here.
TEST(CalibrateDevice, ContentionIsNotMeasuredBesideWhatCanNotRunHere) {
  CalibrateOptions options = on_device();
  Cluster known = with_slow_topk(options);
  CodecTimes foreign = known.codecs.back();
  foreign.codec = "topk(density=0.01) | quant(bits=4)";
  foreign.curve.times_ns.assign(foreign.curve.sizes.size(), 1'000'000'000'000);
  foreign.direction = OpKind::kEncode;
  known.codecs.push_back(foreign);
  options.known = known;
  options.device_computation = [] { return Status(); };
  EXPECT_EQ(calibrated(options).gpu_codec, kTopk);
}

TEST(CalibrateDevice, AllRanksHaveADeviceOrNone) {
  const std::vector<Status> statuses = refusals([](int rank) { return rank == 1 ? on_device(nullptr) : on_device(); });
  EXPECT_EQ(statuses[0].message(), "calibrate: some ranks were given a device and others were not; rank 0 was");
  EXPECT_EQ(statuses[1].message(), "calibrate: some ranks were given a device and others were not; rank 1 was not");
  EXPECT_EQ(statuses[2].code(), StatusCode::kMismatch);
  const std::vector<Status> computing = refusals([](int rank) {
    CalibrateOptions options = on_device();
    if (rank == 2) options.device_computation = [] { return Status(); };
    return options;
  });
  EXPECT_EQ(computing[0].message(),
            "calibrate: some ranks were given a computation for their device and others were not; rank 0 was not");
}

template <typename Queue, typename... Arguments>
class DeviceOfQueues final : public EmulatedSchemeDevice {
 public:
  explicit DeviceOfQueues(Arguments... arguments) : arguments_(arguments...) {}
  Result<std::unique_ptr<DeviceQueue>> make_queue() const override {
    return std::unique_ptr<DeviceQueue>(
        std::apply([](auto... arguments) { return std::make_unique<Queue>(arguments...); }, arguments_));
  }

 private:
  std::tuple<Arguments...> arguments_;
};

TEST(CalibrateDevice, AFullDeviceIsToldToEveryRank) {
  static constexpr std::uint64_t kCopiesFit = 1 << 16;
  using SmallDevice = DeviceOfQueues<EmulatedQueue, DeviceStream, std::uint64_t>;
  const std::vector<Status> statuses = refusals(
      [](int rank) { return rank == 1 ? on_device(std::make_shared<SmallDevice>(nullptr, kCopiesFit)) : on_device(); });
  EXPECT_EQ(statuses[0].message(), "cast(bf16) on the device: rank 1 could not, and says why");
  EXPECT_EQ(statuses[1].message(), "rank 1, cast(bf16) on the device: emulated: device memory: out of memory");
  EXPECT_EQ(statuses[2].message(), statuses[0].message());
}

// Ranks that only wait for the one whose device hangs hear of it in time.
TEST(CalibrateDevice, ADeviceThatHangsIsToldToEveryRank) {
  const std::vector<Status> statuses = refusals([](int rank) {
    CalibrateOptions options = rank == 1 ? on_device(std::make_shared<DeviceOfQueues<StuckQueue>>()) : on_device();
    options.timeout_s = 6;
    return options;
  });
  EXPECT_EQ(statuses[0].code(), StatusCode::kPeerFailed);
  EXPECT_NE(statuses[0].message().find("rank 1 could not, and says why"), std::string::npos) << statuses[0].message();
  EXPECT_EQ(statuses[1].code(), StatusCode::kTimeout);
  EXPECT_NE(statuses[1].message().find("the device has not ended within 3 s"), std::string::npos)
      << statuses[1].message();
  EXPECT_EQ(statuses[2].message(), statuses[0].message());
}

TEST(CalibrateDevice, AComputationThatFailsOnOneRankIsToldToEveryRank) {
  const std::vector<Status> statuses = refusals([](int rank) {
    CalibrateOptions options = on_device();
    // Not the first time.
    options.device_computation = [rank, calls = 0]() mutable -> Status {
      if (rank == 2 && ++calls == 3) return {StatusCode::kIoError, "no such kernel"};
      return {};
    };
    return options;
  });
  EXPECT_EQ(statuses[0].message(), "computation on the device: rank 2 could not, and says why");
  EXPECT_EQ(statuses[1].message(), statuses[0].message());
  EXPECT_EQ(statuses[2].message(), "rank 2, computation on the device: no such kernel");
}

}  // namespace
}  // namespace cortado
