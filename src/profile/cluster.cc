// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/cluster.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <tuple>

#include "core/check.h"
#include "core/format.h"
#include "cortado/codec.h"
#include "profile/places.h"

namespace cortado {

namespace {

// a * b / c to the nearest integer, at most kMaxNs.
std::int64_t scale(std::int64_t a, std::int64_t b, std::int64_t c) {
  std::int64_t small;
  if (!__builtin_mul_overflow(a, b, &small) && small < INT64_MAX - c) return std::min((small + c / 2) / c, kMaxNs);
  const __int128 product = static_cast<__int128>(a) * b + c / 2;
  return static_cast<std::int64_t>(std::min<__int128>(product / c, kMaxNs));
}

Status check_curve(const std::string& place, const TimeCurve& curve, const char* unit) {
  if (curve.sizes.size() != curve.times_ns.size()) {
    return refuse(place + ".time_ns",
                  "as many entries as " + std::string(unit) + ", " + std::to_string(curve.sizes.size()),
                  std::to_string(curve.times_ns.size()));
  }
  for (std::size_t i = 0; i < curve.sizes.size(); ++i) {
    const std::string size_place = place_of(place + "." + unit, i), time_place = place_of(place + ".time_ns", i);
    CORTADO_RETURN_IF_ERROR(check_range(size_place, curve.sizes[i], 1, std::int64_t{1} << 50, unit));
    CORTADO_RETURN_IF_ERROR(check_range(time_place, curve.times_ns[i], 0, kMaxNs, "nanoseconds"));
    if (i == 0) continue;
    if (curve.sizes[i] <= curve.sizes[i - 1]) {
      return refuse(size_place, "more than the entry before, " + std::to_string(curve.sizes[i - 1]),
                    std::to_string(curve.sizes[i]));
    }
    if (curve.times_ns[i] < curve.times_ns[i - 1]) {
      return refuse(time_place, "at least the entry before, " + std::to_string(curve.times_ns[i - 1]),
                    std::to_string(curve.times_ns[i]));
    }
  }
  return {};
}

Status check_collectives(const std::string& place, const CollectiveCurves& curves) {
  if (curves.empty()) return refuse(place, "the times of at least one collective", "none");
  for (const auto& [kind, curve] : curves) {
    const std::string where = place + "." + std::string(op_kind_name(kind));
    if (!is_collective(kind)) return refuse(where, "a collective", "something else");
    if (curve.sizes.empty()) return refuse(where + ".bytes", "at least one entry", "none");
    CORTADO_RETURN_IF_ERROR(check_curve(where, curve, "bytes"));
  }
  return {};
}

Status check_factor(const std::string& place, const std::optional<double>& factor) {
  if (!factor.has_value() || (*factor >= 1 && *factor <= 100)) return {};
  return refuse(place, "a number from 1 to 100", number_text(*factor));
}

Status check_share(const char* place, double share) {
  if (share >= 0 && share <= 1) return {};
  return refuse(place, "a number from 0 to 1", number_text(share));
}

}  // namespace

std::int64_t TimeCurve::at(std::int64_t size) const {
  if (size <= 0 || sizes.empty()) return 0;
  if (size <= sizes.front()) return times_ns.front();
  if (sizes.size() == 1) return scale(times_ns.front(), size, sizes.front());
  const auto above = std::lower_bound(sizes.begin() + 1, sizes.end() - 1, size);
  const std::size_t i = static_cast<std::size_t>(above - sizes.begin());
  const std::int64_t rise = times_ns[i] - times_ns[i - 1], run = sizes[i] - sizes[i - 1];
  return std::min(times_ns[i - 1] + scale(rise, size - sizes[i - 1], run), kMaxNs);
}

Topology Cluster::topology() const {
  Topology topology;
  for (const ClusterLevel& level : levels) topology.levels.push_back({level.name, level.ranks});
  return topology;
}

Status Cluster::check() const {
  if (levels.empty()) return refuse("$.levels", "at least one level", "none");
  for (std::size_t l = 0; l < levels.size(); ++l) {
    const std::string place = place_of("$.levels", l);
    CORTADO_RETURN_IF_ERROR(check_range(place + ".ranks", levels[l].ranks, 1, 1 << 30, "ranks"));
    CORTADO_RETURN_IF_ERROR(check_collectives(place + ".collectives", levels[l].collectives));
    if (const std::optional<double> share = levels[l].overlap_time_share;
        share.has_value() && !(*share > 0 && *share <= 100)) {
      return refuse(place + ".overlap_time_share", "a number above 0, at most 100", number_text(*share));
    }
    CORTADO_RETURN_IF_ERROR(check_factor(place + ".float16_sum_factor", levels[l].float16_sum_factor));
    CORTADO_RETURN_IF_ERROR(check_factor(place + ".bfloat16_sum_factor", levels[l].bfloat16_sum_factor));
  }
  if (const Status status = topology().check(); !status.ok()) {
    return {StatusCode::kCorruptData, "$.levels: " + status.message()};
  }
  std::set<std::pair<int, int>> ranges_seen;
  for (std::size_t r = 0; r < ranges.size(); ++r) {
    const std::string place = place_of("$.ranges", r);
    const auto [first, last] = ranges[r].levels;
    if (first < 0 || last >= static_cast<int>(levels.size()) || first >= last) {
      return refuse(place + ".levels", "two levels or more, inner first",
                    std::to_string(first) + " to " + std::to_string(last));
    }
    if (!ranges_seen.insert({first, last}).second) return refuse(place + ".levels", "each range once", "it again");
    CORTADO_RETURN_IF_ERROR(check_collectives(place + ".collectives", ranges[r].collectives));
  }
  std::map<std::tuple<std::string, OpDevice, OpKind, int>, std::string> codecs_seen;  // their places
  for (std::size_t c = 0; c < codecs.size(); ++c) {
    const std::string place = place_of("$.codecs", c);
    const CodecTimes& times = codecs[c];
    if (times.codec.empty()) return refuse(place + ".codec", "a codec", "an empty text");
    const int most_threads = times.device == OpDevice::kCpu ? 1 << 20 : 1;
    CORTADO_RETURN_IF_ERROR(check_range(place + ".threads", times.threads, 1, most_threads, "threads"));
    const auto [seen, is_new] =
        codecs_seen.insert({{canonical_codec(times.codec), times.device, times.direction, times.threads}, place});
    if (!is_new) {
      return refuse(place, "codec, device, direction and threads that differ from those before",
                    "those of " + seen->second + " (" + std::get<0>(seen->first) + ")");
    }
    if (times.curve.sizes.empty()) return refuse(place + ".elems", "at least one entry", "none");
    CORTADO_RETURN_IF_ERROR(check_curve(place, times.curve, "elems"));
  }
  CORTADO_RETURN_IF_ERROR(check_curve("$.copies.host_to_device", host_to_device, "bytes"));
  CORTADO_RETURN_IF_ERROR(check_curve("$.copies.device_to_host", device_to_host, "bytes"));
  CORTADO_RETURN_IF_ERROR(check_curve("$.copies.pack", pack, "elems"));
  CORTADO_RETURN_IF_ERROR(check_curve("$.copies.unpack", unpack, "elems"));
  CORTADO_RETURN_IF_ERROR(check_share("$.contention.gpu_codec_slows_backward", gpu_codec_slows_backward));
  CORTADO_RETURN_IF_ERROR(check_share("$.contention.cpu_codec_slows_backward", cpu_codec_slows_backward));
  CORTADO_RETURN_IF_ERROR(check_share("$.contention.transfers_slow_backward", transfers_slow_backward.value_or(0)));
  CORTADO_RETURN_IF_ERROR(
      check_range("$.contention.collective_start_ns", collective_start_ns.value_or(0), 0, kMaxNs, "nanoseconds"));
  CORTADO_RETURN_IF_ERROR(check_range("$.contention.cpu_codec_workers", cpu_codec_workers, 1, 64, "workers"));
  return check_range("$.contention.cpu_codec_threads", cpu_codec_threads, 1, 1 << 20, "threads");
}

}  // namespace cortado
