// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Cluster: what links and codecs of the machines take, as measured. The file is `cortado.cluster/1` (docs/planner.md).
// A plain value: any thread may read it.
//
// Sizes of collectives: the full output for all_gather; what every rank sends for all_reduce, reduce_scatter,
// all_to_all, reduce and broadcast; the sum of all inputs for gather. Curves of an outer level are those of the whole
// link of one machine: where several of its ranks run the same outer collective together, they are looked up at the
// sum of their sizes.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cortado/option.h"
#include "cortado/status.h"
#include "cortado/tensor_view.h"
#include "cortado/topology.h"
#include "cortado/unknown_fields.h"

namespace cortado {

// Time for size, measured at some sizes. Linear between them. Below the first size its time, as launching does not get
// cheaper; beyond the last one the slope of the last two (of one size alone: its time per unit).
struct TimeCurve {
  std::vector<std::int64_t> sizes;     // bytes or elements, rising
  std::vector<std::int64_t> times_ns;  // as many, not falling

  // 0 for nothing. Saturates at kMaxNs.
  std::int64_t at(std::int64_t size) const;
};

// The longest time in a profile, ten hours: sums of 2^18 of them fit.
constexpr std::int64_t kMaxNs = std::int64_t{1} << 45;

using CollectiveCurves = std::map<OpKind, TimeCurve>;  // by size in bytes

struct ClusterLevel {
  std::string name;
  int ranks = 1;
  std::string link;  // a word for reports
  CollectiveCurves collectives;
  UnknownFields unknown;
  // What two transfers at once take, as a share of what they take one after the other: 1 where they share the link, 0.5
  // where neither notices the other. Not given: not measured.
  std::optional<double> overlap_time_share = {};
  // What all_reduce, reduce_scatter and reduce take beyond latency to sum float16 or bfloat16, as a multiple of what as
  // many bytes of float32 take, as curves are of float32. Not given: not measured, 1.
  std::optional<double> float16_sum_factor = {}, bfloat16_sum_factor = {};

  double sum_factor(DType summed) const {
    return summed == DType::kFloat16    ? float16_sum_factor.value_or(1)
           : summed == DType::kBFloat16 ? bfloat16_sum_factor.value_or(1)
                                        : 1;
  }
};

// Collectives over several levels at once, where they were measured as such.
struct ClusterRange {
  LevelRange levels;
  CollectiveCurves collectives;
  UnknownFields unknown;
};

struct CodecTimes {
  std::string codec;  // its specification
  OpDevice device = OpDevice::kGpu;
  OpKind direction = OpKind::kEncode;  // or kDecode
  int threads = 1;                     // of the CPU
  TimeCurve curve;                     // by elements
  UnknownFields unknown;
};

struct Cluster {
  std::string name;
  std::string description;
  std::vector<ClusterLevel> levels;  // from the inside out
  std::vector<ClusterRange> ranges;
  std::vector<CodecTimes> codecs;
  TimeCurve host_to_device, device_to_host;  // by bytes; no sizes: such copies cost nothing
  // By elements: of gradients in host memory into the buffer of a plan's bucket, and of the averages back; as above.
  TimeCurve pack, unpack;
  // Share of its speed that the backward pass loses while a codec runs: 1 stands still, 0 does not notice.
  // Plans for gradients in host memory take the CPU's for 1: the engine encodes in the thread of the backward pass.
  double gpu_codec_slows_backward = 0;
  double cpu_codec_slows_backward = 0;
  // The same while a transfer runs, of gradients in host memory also codecs on the CPU; not given: not measured, 0.
  std::optional<double> transfers_slow_backward = {};
  // What starting a collective keeps the thread of the backward pass for, where gradients are in host memory; not
  // given: not measured, 0.
  std::optional<std::int64_t> collective_start_ns = {};
  std::string gpu_codec;      // which one gpu_codec_slows_backward was measured with; empty: unknown
  std::string cpu_codec;      // likewise
  int cpu_codec_workers = 1;  // codecs that run on the CPU at the same time ...
  int cpu_codec_threads = 1;  // ... each with so many threads: entries of `codecs` with others are left out
  std::string fingerprint;    // of the machine; empty: unknown
  std::string communicator;   // what ran the collectives; empty: unknown
  UnknownFields unknown;

  Topology topology() const;

  // As Job::check().
  Status check() const;
};

// As those of a job.
std::string cluster_to_json(const Cluster& cluster);
Result<Cluster> cluster_from_json(std::string_view json);

Status save_cluster(const Cluster& cluster, const std::string& path);
Result<Cluster> load_cluster(const std::string& path);

}  // namespace cortado
