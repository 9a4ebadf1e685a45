// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// For tests of auto: a cluster written by hand, of which predictions are known in advance.
#pragma once

#include <string>
#include <vector>

#include "cortado/auto.h"
#include "cortado/cluster.h"

namespace cortado {

// Two machines of two ranks, named as two_levels() does. Within a machine a byte takes a nanosecond, between them
// `slow_ns`; codecs take a nanosecond for an element. `codecs`: specifications.
inline Cluster two_machines(std::int64_t slow_ns, const std::vector<std::string>& codecs) {
  const auto curves = [](std::int64_t ns_per_byte) {
    CollectiveCurves made;
    for (const OpKind kind : {OpKind::kAllReduce, OpKind::kReduceScatter, OpKind::kAllGather, OpKind::kAllToAll,
                              OpKind::kReduce, OpKind::kBroadcast, OpKind::kGather}) {
      made[kind] = {.sizes = {1000, 1'000'000}, .times_ns = {1000 * ns_per_byte, 1'000'000 * ns_per_byte}};
    }
    return made;
  };
  Cluster cluster;
  cluster.name = "two machines";
  cluster.levels = {{.name = "intra", .ranks = 2, .link = "", .collectives = curves(1), .unknown = {}},
                    {.name = "inter", .ranks = 2, .link = "", .collectives = curves(slow_ns), .unknown = {}}};
  for (const std::string& codec : codecs) {
    for (const OpKind direction : {OpKind::kEncode, OpKind::kDecode}) {
      cluster.codecs.push_back({.codec = codec,
                                .device = OpDevice::kCpu,
                                .direction = direction,
                                .threads = 1,
                                .curve = {.sizes = {1000, 1'000'000}, .times_ns = {1000, 1'000'000}},
                                .unknown = {}});
    }
  }
  return cluster;
}

}  // namespace cortado
