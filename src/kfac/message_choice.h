// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Which codec makes a message of K-FAC shortest, and how many tensors should share one table of codes; or that it is
// shorter as it is. Pure. With p ranks, values V(r) and payloads P(r) of rank r, E(r) and D(r) the times to encode and
// to decode what it owns, T the time of a collective on the cluster:
//
//   gathered by all     plain T(p max_r V(r))    compressed  max_r E(r) + T(p max_r P(r)) + sum_r D(r)
//   summed by owners    plain T(sum_r V(r))      compressed  max_r [sum of E(o) + D(o) over o != r, + (p-1) D(r)]
//                                                            + T(p / (p-1) max_r P(r))
//
// In a gather of unequal parts all wait for the largest one, which goes over the link of its owner to each of the
// others. Who sends to owners decodes too, for the error. Source: the performance model of COMPSO (PPoPP 2025) in our
// terms.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cortado/cluster.h"
#include "cortado/status.h"

namespace cortado {

struct MessageShape {
  bool is_sum = false;
  std::vector<int> ranks;                        // who takes part
  std::vector<std::vector<std::int64_t>> elems;  // of the tensors that each of them owns, in order
};

struct MessageTrial {
  std::string codec;
  std::int64_t aggregate = 0;      // as in OwnerGatherOptions
  std::int64_t payload_bytes = 0;  // of the rank that sends most
  std::string timed_as = {};       // the codec whose times it has where the cluster has none of its own
};

struct MessageChoice {
  int trial = -1;                 // -1: uncompressed
  std::int64_t predicted_ns = 0;  // of the best trial, taken or not; 0: there is none
  std::int64_t uncompressed_ns = 0;
  std::string reason;
};

// Compresses if that saves at least the share `min_gain`; of equal times the first. Codecs of which the cluster has no
// times are left out. `cluster` has passed check() and has at least two ranks.
Result<MessageChoice> choose_codec(const MessageShape& shape, std::span<const MessageTrial> trials,
                                   const Cluster& cluster, double min_gain);

}  // namespace cortado
