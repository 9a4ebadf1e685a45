// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "planner/cost/relaxed.h"

#include <algorithm>

#include "planner/cost/collective_cost.h"

namespace cortado {

namespace {

// True if it was changed. Time per unit is monotone between two points, so the points decide.
bool relax(TimeCurve* curve) {
  bool changed = false;
  const TimeCurve measured = *curve;
  for (std::size_t i = 1; i < curve->sizes.size(); ++i) {
    const __int128 most = static_cast<__int128>(curve->times_ns[i - 1]) * curve->sizes[i] / curve->sizes[i - 1];
    if (curve->times_ns[i] <= most + 1) continue;  // 1: curves are rounded
    curve->times_ns[i] = static_cast<std::int64_t>(most);
    changed = true;
  }
  if (!changed) return false;
  // Beyond the last point neither steeper than the measured curve, nor than its own time per unit.
  const std::int64_t last = curve->sizes.back(), time_ns = curve->times_ns.back();
  // A nanosecond less: times at other sizes are rounded, too, and further on more than one of these would come.
  const std::int64_t rise_ns = std::max<std::int64_t>(0, measured.at(2 * last) - measured.times_ns.back() - 1);
  curve->sizes.push_back(2 * last);
  curve->times_ns.push_back(time_ns + std::min(rise_ns, time_ns));
  return true;
}

bool relax(CollectiveCurves* curves) {
  bool changed = false;
  for (auto& [kind, curve] : *curves) changed |= relax(&curve);
  return changed;
}

// All collectives as curves: those that were not measured must not follow from relaxed ones.
void write_out(const CollectiveCost& cost, LevelRange range, CollectiveCurves* curves) {
  for (int k = static_cast<int>(OpKind::kAllReduce); k <= static_cast<int>(OpKind::kGather); ++k) {
    const OpKind kind = static_cast<OpKind>(k);
    if (curves->count(kind) > 0) continue;
    constexpr std::int64_t kSmall = 1, kLarge = std::int64_t{1} << 36;
    // A nanosecond less: times at other sizes are rounded, too.
    const auto at = [&](std::int64_t bytes) {
      return std::max<std::int64_t>(0, cost.time_ns(kind, range, bytes, 1) - 1);
    };
    (*curves)[kind] = {{kSmall, kLarge}, {at(kSmall), at(kLarge)}};
  }
}

}  // namespace

std::optional<Cluster> relax_curves(const Cluster& cluster) {
  Cluster relaxed = cluster;
  bool changed = relax(&relaxed.host_to_device);
  changed |= relax(&relaxed.device_to_host);
  for (ClusterLevel& level : relaxed.levels) {
    changed |= relax(&level.collectives);
    // With a factor on what is beyond latency, time per unit could rise; and units may be those of other types.
    changed |= level.sum_factor(DType::kFloat16) > 1 || level.sum_factor(DType::kBFloat16) > 1;
    level.float16_sum_factor.reset();
    level.bfloat16_sum_factor.reset();
  }
  for (ClusterRange& range : relaxed.ranges) changed |= relax(&range.collectives);
  for (CodecTimes& times : relaxed.codecs) changed |= relax(&times.curve);
  changed |= relax(&relaxed.pack);
  changed |= relax(&relaxed.unpack);
  if (!changed) return std::nullopt;
  const CollectiveCost cost(cluster);
  const int levels = static_cast<int>(cluster.levels.size());
  for (int first = 0; first < levels; ++first) {
    write_out(cost, {first, first}, &relaxed.levels[first].collectives);
    for (int last = first + 1; last < levels; ++last) {
      const LevelRange wanted = {first, last};
      auto range = std::find_if(relaxed.ranges.begin(), relaxed.ranges.end(),
                                [&](const ClusterRange& r) { return r.levels == wanted; });
      if (range == relaxed.ranges.end()) {
        range = relaxed.ranges.emplace(relaxed.ranges.end());
        range->levels = wanted;
      }
      write_out(cost, wanted, &range->collectives);
    }
  }
  return relaxed;
}

}  // namespace cortado
