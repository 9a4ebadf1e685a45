// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The slow truth for tests and benchmarks: every fusion of neighbours, every option of the whole tree with every codec,
// each simulated. And small random jobs and clusters to try it on.
#pragma once

#include <functional>
#include <random>
#include <string>
#include <vector>

#include "planner/search/problem.h"

namespace cortado::testing {

// The shortest step of all plans.
inline std::int64_t brute_force_ns(Problem& problem) {
  std::vector<int> candidates;
  for (int codec = -1; codec < static_cast<int>(problem.codecs().size()); ++codec) {
    for (Option& option : problem.options_of(codec)) {
      candidates.push_back(problem.add_candidate({codec, std::move(option)}));
    }
  }
  Simulator simulator(problem.simulated(), problem.levels());
  std::int64_t best_ns = Simulator::kNever;
  std::vector<SimulatedBucket> buckets;
  const std::function<void(int)> place_from = [&](int first) {
    if (first == problem.tensors()) {
      best_ns = std::min(best_ns, simulator.run(buckets, best_ns));
      return;
    }
    for (int last = first; last < problem.tensors() && problem.may_fuse(first, last); ++last) {
      for (const int candidate : candidates) {
        const Way* way = problem.way_of(first, last, candidate);
        if (way == nullptr) continue;
        buckets.push_back({problem.ready_ns(last), way->chain.steps, problem.elems(first, last)});
        place_from(last + 1);
        buckets.pop_back();
      }
    }
  };
  place_from(0);
  return best_ns;
}

// Times of a link: latency and bandwidth of either kind of collective drawn, so that neither form always wins.
inline ClusterLevel random_level(std::mt19937_64& random, const std::string& name, int ranks, double ns_per_byte) {
  ClusterLevel level;
  level.name = name;
  level.ranks = ranks;
  const auto draw = [&](double low, double high) { return std::uniform_real_distribution<double>(low, high)(random); };
  const double hop_ns = draw(1e3, 5e4);
  const auto curve = [&](double hops, double shares) {
    TimeCurve times;
    for (std::int64_t bytes = 1024; bytes <= std::int64_t{1} << 28; bytes *= 16) {
      times.sizes.push_back(bytes);
      times.times_ns.push_back(
          static_cast<std::int64_t>(hops * hop_ns + shares * ns_per_byte * static_cast<double>(bytes)));
    }
    return times;
  };
  const double n = ranks;
  level.collectives = {{OpKind::kAllReduce, curve(2 * (n - 1), 2 * (n - 1) / n)},
                       {OpKind::kReduceScatter, curve(n - 1, (n - 1) / n)},
                       {OpKind::kAllGather, curve(n - 1, (n - 1) / n)},
                       {OpKind::kAllToAll, curve(n - 1, (n - 1) / n)},
                       {OpKind::kReduce, curve(2, 1)},
                       {OpKind::kBroadcast, curve(2, 1)},
                       {OpKind::kGather, curve(1, (n - 1) / n)}};
  return level;
}

inline CodecTimes random_codec(std::mt19937_64& random, const std::string& codec, OpDevice device, OpKind direction) {
  const auto draw = [&](double low, double high) { return std::uniform_real_distribution<double>(low, high)(random); };
  const double launch_ns = device == OpDevice::kGpu ? draw(1e4, 3e5) : draw(1e3, 1e4);
  const double ns_per_elem = device == OpDevice::kGpu ? draw(0.02, 0.5) : draw(0.3, 3);
  CodecTimes times;
  times.codec = codec;
  times.device = device;
  times.direction = direction;
  for (std::int64_t elems = 256; elems <= std::int64_t{1} << 26; elems *= 16) {
    times.curve.sizes.push_back(elems);
    const double ns = ns_per_elem * static_cast<double>(elems);
    times.curve.times_ns.push_back(
        static_cast<std::int64_t>(device == OpDevice::kGpu ? std::max(launch_ns, ns) : launch_ns + ns));
  }
  return times;
}

struct RandomCase {
  Job job;
  Cluster cluster;
};

// `devices`: where codecs have times.
inline RandomCase random_case(std::uint64_t seed, int tensors, int levels, const std::vector<OpDevice>& devices) {
  std::mt19937_64 random(seed);
  const auto draw = [&](double low, double high) { return std::uniform_real_distribution<double>(low, high)(random); };
  const auto pick = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  RandomCase result;
  result.cluster.name = "random";
  const char* names[] = {"intra", "inter", "wan"};
  double ns_per_byte = draw(0.005, 0.2);
  for (int l = 0; l < levels; ++l) {
    result.cluster.levels.push_back(random_level(random, names[l], pick(2, 8), ns_per_byte));
    ns_per_byte *= draw(1, 20);
  }
  const char* codecs[] = {"randk(density=0.01)", "topk(density=0.01)", "sign(scale=mean_abs)", "cast(fp16)"};
  const char* codec = codecs[pick(0, 3)];
  for (const OpDevice device : devices) {
    for (const OpKind direction : {OpKind::kEncode, OpKind::kDecode}) {
      result.cluster.codecs.push_back(random_codec(random, codec, device, direction));
    }
  }
  result.cluster.gpu_codec_slows_backward = pick(0, 2) / 2.0;
  result.cluster.transfers_slow_backward = pick(0, 2) / 2.0;
  result.cluster.cpu_codec_workers = pick(1, 2);
  result.cluster.host_to_device = result.cluster.device_to_host = {{1024, 1 << 24}, {10000, 1500000}};
  result.job.name = "random";
  double ready_ns = 0;
  const double pace = draw(1e5, 1e7);
  for (int t = 0; t < tensors; ++t) {
    JobTensor tensor;
    tensor.name = "t" + std::to_string(t);
    tensor.shape = {static_cast<std::int64_t>(std::exp2(draw(10, 25)))};
    tensor.ready_ns = static_cast<std::int64_t>(ready_ns += draw(0, 1) * pace);
    result.job.tensors.push_back(tensor);
  }
  if (pick(0, 3) == 0) {
    result.job.forward_ns = static_cast<std::int64_t>(ready_ns / 2);
    result.job.overlap_forward = true;
  }
  result.cluster.cpu_codec_slows_backward = pick(0, 2) / 2.0;
  if (devices == std::vector{OpDevice::kCpu} && pick(0, 1) == 0) {  // gradients in host memory, which are packed
    result.job.device = OpDevice::kCpu;
    const auto copy = [&](double ns_per_elem) {
      return TimeCurve{{1024, 1 << 22}, {500, static_cast<std::int64_t>(ns_per_elem * (1 << 22))}};
    };
    result.cluster.pack = copy(draw(0.2, 2));
    result.cluster.unpack = copy(draw(0.2, 2));
    if (pick(0, 1) == 0) result.cluster.collective_start_ns = pick(0, 2'000'000);
  }
  return result;
}

}  // namespace cortado::testing
