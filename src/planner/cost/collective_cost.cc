// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "planner/cost/collective_cost.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/checked_math.h"

namespace cortado {

namespace {

// A collective takes hops * a + shares * S/B.
struct StandardForm {
  double hops, shares;
};

// Among n ranks, k of them on each machine.
StandardForm standard_form(OpKind kind, double n, double k) {
  switch (kind) {
    case OpKind::kAllReduce:
      return {2 * (n - 1), 2 * (n - 1) / n};
    case OpKind::kAllToAll:
      return {n - 1, k > 1 ? k * (n - k) / n : (n - 1) / n};
    case OpKind::kReduce:
    case OpKind::kBroadcast:
      return {static_cast<double>(std::bit_width(static_cast<std::uint64_t>(n) - 1)), 1};
    case OpKind::kGather:
      return {1, (n - 1) / n};
    default:
      return {n - 1, (n - 1) / n};
  }
}

struct Link {
  double hop_ns = 0, ns_per_byte = 0;
};

// Latency from the smallest measured size, bandwidth from the two largest, of the first collective that was measured.
// Of one size either may be all of its time: both are taken to be.
Link measured_link(const CollectiveCurves& curves, int ranks) {
  constexpr OpKind kByTrust[] = {OpKind::kAllGather, OpKind::kReduceScatter, OpKind::kAllReduce, OpKind::kAllToAll,
                                 OpKind::kBroadcast, OpKind::kReduce,        OpKind::kGather};
  for (const OpKind kind : kByTrust) {
    const auto found = curves.find(kind);
    if (found == curves.end()) continue;
    const TimeCurve& curve = found->second;
    const StandardForm form = standard_form(kind, ranks, 1);
    const std::size_t last = curve.sizes.size() - 1;
    const auto size = [&](std::size_t i) { return static_cast<double>(curve.sizes[i]); };
    const auto time = [&](std::size_t i) { return static_cast<double>(curve.times_ns[i]); };
    if (last == 0) return {time(0) / form.hops, time(0) / size(0) / form.shares};
    const double slope = (time(last) - time(last - 1)) / (size(last) - size(last - 1));
    return {std::max(0.0, time(0) - slope * size(0)) / form.hops, slope / form.shares};
  }
  return {};
}

}  // namespace

CollectiveCost::CollectiveCost(const Cluster& cluster) : levels_(static_cast<int>(cluster.levels.size())) {
  ranges_.resize(static_cast<std::size_t>(levels_) * levels_);
  for (int first = 0; first < levels_; ++first) {
    for (int last = first; last < levels_; ++last) ranges_[first * levels_ + last] = make_range(cluster, {first, last});
  }
}

CollectiveCost::Range CollectiveCost::make_range(const Cluster& cluster, LevelRange levels) const {
  Range range;
  for (int l = levels.first; l <= levels.last; ++l) {
    if (cluster.levels[l].ranks > 1) range.link = l;
  }
  if (range.link < 0) return range;
  const ClusterLevel& outer = cluster.levels[range.link];
  const double n = cluster.topology().group_size(levels);
  const Link link = measured_link(outer.collectives, outer.ranks);
  range.level = &outer;
  const CollectiveCurves* measured = levels.first == levels.last ? &outer.collectives : nullptr;
  for (const ClusterRange& candidate : cluster.ranges) {
    if (candidate.levels == levels) measured = &candidate.collectives;
  }
  for (std::size_t k = 0; k < kKinds; ++k) {
    const OpKind kind = static_cast<OpKind>(k);
    const StandardForm form = standard_form(kind, n, n / outer.ranks);
    range.forms[k].latency_ns = std::llround(form.hops * link.hop_ns);
    range.forms[k].ns_per_byte = form.shares * link.ns_per_byte;
    if (measured == nullptr) continue;
    const auto found = measured->find(kind);
    if (found != measured->end()) range.forms[k].curve = &found->second;
  }
  return range;
}

std::int64_t CollectiveCost::time_ns(OpKind kind, LevelRange range, std::int64_t bytes, std::int64_t groups,
                                     DType summed) const {
  const Range& levels = range_at(range);
  if (levels.link < 0 || bytes <= 0) return 0;
  const std::int64_t total = checked_mul(bytes, groups).value_or(std::numeric_limits<std::int64_t>::max());
  const Form& form = levels.forms[static_cast<std::size_t>(kind)];
  std::int64_t time_ns = 0;
  if (form.curve != nullptr) {
    time_ns = form.curve->at(total);
  } else {
    const double ns = form.ns_per_byte * static_cast<double>(total);
    time_ns = std::min(form.latency_ns + static_cast<std::int64_t>(std::min(ns, 1e13) + 0.5), kMaxNs);
  }
  const double factor = is_sum(kind) ? levels.level->sum_factor(summed) : 1;
  if (factor == 1) return time_ns;
  const std::int64_t latency_ns = form.curve != nullptr ? form.curve->times_ns.front() : form.latency_ns;
  const double beyond = factor * static_cast<double>(time_ns - latency_ns);
  return std::min<std::int64_t>(latency_ns + std::llround(beyond), kMaxNs);
}

int CollectiveCost::link_of(LevelRange range) const { return range_at(range).link; }

}  // namespace cortado
