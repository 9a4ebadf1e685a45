// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Calibrator: what calibrate() (cortado/calibrate.h) does, in four files: calibrate.cc shares out the time and times
// one point after the other, calibrate_links.cc, calibrate_codecs.cc and calibrate_device.cc say of what.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "collective/agreement.h"
#include "collective/scheme_device.h"
#include "core/aligned_buffer.h"
#include "core/function_ref.h"
#include "core/linalg.h"
#include "core/seconds.h"
#include "cortado/calibrate.h"
#include "cortado/codec.h"

namespace cortado {

constexpr std::int64_t kFewestRuns = 2, kMostRuns = 15;
constexpr std::int64_t kMostCodecRuns = 5;  // codecs take little else than their time; links shall have what is left
constexpr std::int64_t kFactor = 16;        // from size to size
constexpr std::int64_t kSmallestBytes = 4096, kSmallestElems = 1024;
// Beyond so many times the smallest size's time it is the size that counts, and time grows with it.
constexpr std::int64_t kOfSize = 3;
constexpr std::size_t kFewestSizes = 2;

// Two sizes or more, the last one `largest`. They lie a factor of two apart at least: two that are close would tell
// nothing of the slope.
std::vector<std::int64_t> sizes_up_to(std::int64_t smallest, std::int64_t largest);

struct Point {
  std::int64_t median_ns = 0, spread_ns = 0, runs = 0;
};

struct Curve {
  TimeCurve times;
  std::vector<std::int64_t> spreads_ns, runs;

  void add(std::int64_t size, const Point& point) {
    // A larger size takes no less; where it was measured so, the machine was busy at the smaller ones.
    for (std::int64_t& before_ns : times.times_ns) before_ns = std::min(before_ns, point.median_ns);
    times.sizes.push_back(size);
    times.times_ns.push_back(point.median_ns);
    spreads_ns.push_back(point.spread_ns);
    runs.push_back(point.runs);
  }
};

// Beside a curve in the file.
void note_spread(const std::string& pointer, const Curve& curve, UnknownFields* unknown);

// Where there are no times yet.
void keep_unless_known(const std::string& pointer, const Curve& curve, TimeCurve* times, UnknownFields* unknown);

// In both directions; on the CPU with one thread.
bool is_measured(const std::vector<CodecTimes>& times, const std::string& spec, OpDevice device);

inline bool is_of_size(const TimeCurve& curve) { return curve.times_ns.back() >= kOfSize * curve.times_ns.front(); }
inline bool may_have_one_more(OpKind kind) { return kind == OpKind::kAllReduce || kind == OpKind::kAllGather; }

// Whether a rank that encodes keeps what is lost, in plans as the planner makes them.
inline bool has_feedback(const Codec& codec) { return codec.row().traits.needs_residual && !codec.is_majority_vote(); }

// What is timed of a codec: one tensor, about square, of values as gradients are.
class CodecWork {
 public:
  explicit CodecWork(std::int64_t elems);
  virtual ~CodecWork() = default;
  CodecWork(const CodecWork&) = delete;
  CodecWork& operator=(const CodecWork&) = delete;

  std::int64_t elems() const { return rows_ * cols_; }
  // With what error feedback costs. decode() is of what the last encode() made.
  virtual Status encode() = 0;
  virtual Status decode() = 0;

  static void fill(std::span<float> values);

 protected:
  std::size_t size() const { return static_cast<std::size_t>(elems()); }
  const std::int64_t cols_, rows_;
};
// What codecs on the CPU read and write, array after array: about as much as a model has, of which caches hold little.
struct CpuArrays {
  explicit CpuArrays(std::int64_t max_elems);

  AlignedBuffer<float> gradients, residuals, outputs;
};
// `arrays` must outlive it, and serve it alone.
std::unique_ptr<CodecWork> make_cpu_work(const Codec& codec, std::int64_t elems, CpuArrays& arrays);
// On the device, without copies of values and payloads; has encoded and decoded once. `timeout`: of each wait for the
// device.
Result<std::unique_ptr<CodecWork>> make_device_work(const SchemeDevice& device, const Codec& codec, std::int64_t elems,
                                                    const Clock* clock, std::chrono::nanoseconds timeout);

// Stands for computation.
class MatrixProduct {
 public:
  Status run() {
    multiply(Operand::kAsIs, Operand::kAsIs, kSide, kSide, kSide, a_.data(), b_.data(), c_.data());
    return {};
  }

 private:
  static constexpr std::int64_t kSide = 192;
  static constexpr std::size_t kElems = static_cast<std::size_t>(kSide * kSide);
  AlignedBuffer<float> a_{kElems}, b_{kElems}, c_{kElems};
};

// What collectives read and write. Where one of them has failed, its end was perhaps not seen: then all of it stays for
// ever.
class LentBuffers {
 public:
  LentBuffers() = default;
  ~LentBuffers();
  LentBuffers(const LentBuffers&) = delete;
  LentBuffers& operator=(const LentBuffers&) = delete;

  float* add(std::size_t values) { return buffers_.emplace_back(values).data(); }
  void lose() { is_lost_ = true; }

 private:
  std::vector<AlignedBuffer<float>> buffers_;
  bool is_lost_ = false;
};

class Calibrator {
 public:
  Calibrator(Communicator* communicator, const CalibrateOptions& options, const Clock* clock)
      : communicator_(communicator), options_(options), clock_(clock), timeout_(from_seconds(options.timeout_s)) {}

  Result<Cluster> run();

 private:
  Status barrier();
  Result<std::vector<std::int64_t>> longest(std::span<const std::int64_t> own) {
    return largest_of_ranks(communicator_, own, timeout_);
  }
  // An error on every rank if `own` is one on some: that one there, and one that names the rank on the others.
  Status on_all_ranks(const std::string& what, const Status& own);
  Status told_of(const std::string& what, const Status& own, std::int64_t failed_rank_plus_1) const;
  Status wait_for_all(Communicator* group, std::span<const WorkId> works, Status started, LentBuffers* buffers) const;
  Status run_collective(Communicator* group, const CollectiveCall& call, LentBuffers* buffers) const;
  Result<Cluster> start(const Topology& topology, const ClusterIdentity& identity);
  void count_points(const Cluster& cluster);
  Result<Point> measure(const std::string& what, FunctionRef<Status()> act, int calls = 1,
                        std::int64_t most_runs = kMostRuns);
  bool is_worth_it(const Curve& curve, int calls = 1) const;
  bool is_call_worth_it(const Curve& curve, int calls) const;
  bool has_time_for_one_more(const Curve& curve, std::int64_t groups) const;
  void continue_as_all_reduce(const CollectiveCurves& curves, Curve* curve) const;

  Status measure_collectives(Communicator* group, const std::string& level, std::int64_t groups,
                             CollectiveCurves* curves, UnknownFields* unknown);
  Status measure_overlap(Communicator* group, std::int64_t groups, ClusterLevel* level);
  bool has_sums_to_measure(const ClusterLevel& level) const {
    return !level.float16_sum_factor.has_value() || !level.bfloat16_sum_factor.has_value();
  }
  Status measure_sums(Communicator* group, std::int64_t groups, ClusterLevel* level);
  Status measure_transfers(const CollectiveCurves& curves, Cluster* cluster);
  bool measures_starts(const Cluster& cluster) const {
    return !cluster.collective_start_ns.has_value() && communicator_->world_size() > 1 &&
           std::count(options_.collectives.begin(), options_.collectives.end(), OpKind::kAllReduce) > 0;
  }
  Status measure_starts(const CollectiveCurves& curves, Cluster* cluster);
  std::array<std::int64_t, 2> packed_sizes() const {
    const std::vector<std::int64_t> sizes = sizes_up_to(kSmallestElems, options_.max_elems);
    return {sizes.front(), sizes.back()};
  }
  bool measures_packing(const Cluster& cluster) const {
    return !options_.codecs.empty() && (cluster.pack.sizes.empty() || cluster.unpack.sizes.empty());
  }
  CpuArrays& cpu_arrays() {
    if (!cpu_arrays_.has_value()) cpu_arrays_.emplace(options_.max_elems);
    return *cpu_arrays_;
  }
  Status measure_packing(Cluster* cluster);
  Result<std::unique_ptr<CodecWork>> make_work(const Codec& codec, OpDevice device, std::int64_t elems);
  Status measure_codec(const std::string& spec, OpDevice device, std::vector<CodecTimes>* times);
  Result<double> share_lost_beside(const std::string& spec, OpDevice device, const std::string& name,
                                   FunctionRef<Status()> computation);
  Status measure_contention(Cluster* cluster);

  Status find_device_codecs();
  bool measures_copies(const Cluster& cluster) const {
    return options_.device != nullptr && (cluster.host_to_device.sizes.empty() || cluster.device_to_host.sizes.empty());
  }
  Status measure_copies(Cluster* cluster);
  Status measure_contention_on_device(Cluster* cluster);

  Communicator* communicator_;
  const CalibrateOptions& options_;
  const Clock* clock_;
  std::chrono::nanoseconds timeout_;
  std::vector<std::string> device_codecs_;  // of options_.codecs, those that have a variant on every rank's device
  std::optional<CpuArrays> cpu_arrays_;
  std::int64_t start_ns_ = 0;
  double points_ = 1, points_done_ = 0;
  std::int64_t kinds_left_ = 0;  // of collectives, over all levels and ranges, that have no times yet
  double left_ns_ = 0;           // of the budget, the same on all ranks; below 0: it was not enough
  double share_ns_ = 0;          // for a point, of what is left
};

}  // namespace cortado
