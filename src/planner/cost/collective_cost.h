// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What a collective takes on a cluster: its measured curve, or where it was not measured the standard form of the
// link's latency and bandwidth. Pure; any thread may use it. What `bytes` means: include/cortado/cluster.h.
//
//   n ranks, a = latency of a hop, B = bytes per second, S = bytes
//   all_reduce                                2(n-1) a + 2(n-1)/n S/B
//   reduce_scatter, all_gather, all_to_all     (n-1) a +  (n-1)/n S/B
//   reduce, broadcast                    ceil(log2 n) a +         S/B
//   gather                                           a +  (n-1)/n S/B
//
// Over several levels, n = k N ranks on N machines of k: the same of the n ranks on the outermost of the links, as each
// machine's link carries all of it; but all_to_all has k(N-1)/N S/B, as a machine keeps what it sends to itself.
// Source: Thakur et al. 2005; NCCL's PERFORMANCE.md; the Espresso notes, section 3.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "cortado/cluster.h"
#include "cortado/tensor_view.h"

namespace cortado {

class CollectiveCost {
 public:
  // `cluster` has passed check() and must outlive this.
  explicit CollectiveCost(const Cluster& cluster);

  // `bytes` of one group, where `groups` ranks of an inner unit run the collective together, each in its own group and
  // all over the unit's one link. `summed`: what is added up, if anything is.
  std::int64_t time_ns(OpKind kind, LevelRange range, std::int64_t bytes, std::int64_t groups,
                       DType summed = DType::kFloat32) const;

  // The level whose link a collective occupies: the outermost one with more than one rank; -1 where nothing travels.
  int link_of(LevelRange range) const;

 private:
  static constexpr std::size_t kKinds = static_cast<std::size_t>(OpKind::kGather) + 1;
  struct Form {  // where there is no curve
    const TimeCurve* curve = nullptr;
    std::int64_t latency_ns = 0;
    double ns_per_byte = 0;
  };
  struct Range {
    int link = -1;
    std::array<Form, kKinds> forms;
    const ClusterLevel* level = nullptr;  // of the link
  };

  Range make_range(const Cluster& cluster, LevelRange levels) const;
  const Range& range_at(LevelRange range) const { return ranges_[range.first * levels_ + range.last]; }

  int levels_;
  std::vector<Range> ranges_;  // [first][last]
};

}  // namespace cortado
