// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/calibrate.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>

#include "core/check.h"
#include "cortado/codec.h"
#include "profile/calibrator.h"
#include "profile/host.h"
#include "profile/places.h"

namespace cortado {

namespace {

constexpr double kLargestShare = 2;  // of a point's share of the budget, for one run

std::string list_text(const std::vector<std::int64_t>& values) {
  std::string text = "[";
  for (const std::int64_t value : values) text += (text.size() > 1 ? ", " : "") + std::to_string(value);
  return text + "]";
}

}  // namespace

std::vector<std::int64_t> sizes_up_to(std::int64_t smallest, std::int64_t largest) {
  std::vector<std::int64_t> sizes;
  for (std::int64_t size = std::min(smallest, largest / 2); size <= largest / 2; size *= kFactor) sizes.push_back(size);
  sizes.push_back(largest);
  return sizes;
}

void note_spread(const std::string& pointer, const Curve& curve, UnknownFields* unknown) {
  (*unknown)[pointer + "/spread_ns"] = list_text(curve.spreads_ns);
  (*unknown)[pointer + "/runs"] = list_text(curve.runs);
}

void keep_unless_known(const std::string& pointer, const Curve& curve, TimeCurve* times, UnknownFields* unknown) {
  if (!times->sizes.empty()) return;
  note_spread(pointer, curve, unknown);
  *times = curve.times;
}

Status Calibrator::barrier() {
  const std::byte own{};
  std::vector<std::byte> all(static_cast<std::size_t>(communicator_->world_size()));
  return communicator_->all_gather({&own, 1}, all, timeout_);
}

// What is known of these ranks, or a cluster without times.
Result<Cluster> Calibrator::start(const Topology& topology, const ClusterIdentity& identity) {
  Cluster fresh;
  for (const TopologyLevel& level : topology.levels) {
    ClusterLevel& added = fresh.levels.emplace_back();
    added.name = level.name;
    added.ranks = level.ranks;
    added.link = communicator_->name();
  }
  fresh.fingerprint = identity.fingerprint;
  fresh.communicator = identity.communicator;
  const std::string own = options_.known.has_value() ? cluster_to_json(*options_.known) : "";
  CORTADO_ASSIGN_OR_RETURN(const std::string text, text_of_rank_0(communicator_, own, timeout_));
  if (text.empty()) return fresh;
  CORTADO_ASSIGN_OR_RETURN(Cluster known, cluster_from_json(text));
  for (CodecTimes& times : known.codecs) times.codec = canonical_codec(times.codec);
  for (std::string* slowest : {&known.gpu_codec, &known.cpu_codec}) {
    if (!slowest->empty()) *slowest = canonical_codec(*slowest);
  }
  const Status fits = check_cluster_is_of(known, identity, topology);
  if (fits.ok()) return known;
  if (options_.note) options_.note("measures everything: " + fits.message());
  return fresh;
}

void Calibrator::count_points(const Cluster& cluster) {
  std::size_t kept = 0, missing_collectives = 0, missing_codecs = 0, one_more = 0, sums = 0;
  std::size_t of_contention = options_.codecs.empty() ? 0 : 2;
  const bool has_all_reduce =
      std::count(options_.collectives.begin(), options_.collectives.end(), OpKind::kAllReduce) > 0;
  const bool measures_transfers = options_.contention && has_all_reduce &&
                                  !cluster.transfers_slow_backward.has_value() && communicator_->world_size() > 1;
  const auto count = [&](const CollectiveCurves& curves) {
    for (const OpKind kind : options_.collectives) {
      ++(curves.contains(kind) ? kept : missing_collectives);
      one_more += !curves.contains(kind) && may_have_one_more(kind);
    }
  };
  for (const ClusterLevel& level : cluster.levels) {
    count(level.collectives);
    of_contention += level.overlap_time_share.has_value() ? 0 : 2;
    sums += has_all_reduce && has_sums_to_measure(level) ? 3 : 0;
  }
  for (const ClusterRange& range : cluster.ranges) count(range.collectives);
  for (const std::string& spec : options_.codecs) {
    (is_measured(cluster.codecs, spec, OpDevice::kCpu) ? kept : missing_codecs) += 2;
  }
  for (const std::string& spec : device_codecs_) {
    (is_measured(cluster.codecs, spec, OpDevice::kGpu) ? kept : missing_codecs) += 2;
  }
  if (!device_codecs_.empty() && options_.device_computation) of_contention += 2;
  kinds_left_ = static_cast<std::int64_t>(missing_collectives);
  points_ = static_cast<double>(
      one_more + sums + missing_collectives * sizes_up_to(kSmallestBytes, options_.max_bytes).size() +
      missing_codecs * sizes_up_to(kSmallestElems, options_.max_elems).size() +
      (measures_packing(cluster) ? 2 * packed_sizes().size() : 0) +
      (measures_copies(cluster) ? 2 * sizes_up_to(kSmallestBytes, options_.max_bytes).size() : 0) +
      (options_.contention ? of_contention : 0) + (measures_transfers ? 4 : 0) + (measures_starts(cluster) ? 1 : 0));
  left_ns_ = options_.budget_s * 1e9;
  share_ns_ = left_ns_ / std::max(1.0, points_);
  if (!options_.note || kept == 0) return;
  const std::size_t missing = missing_collectives + missing_codecs;
  options_.note("keeps " + std::to_string(kept) + " of " + std::to_string(kept + missing) +
                " curves, which are known; measures " + std::to_string(missing));
}

// Times some runs of `calls` calls of `act` on all ranks at once; the number of runs is the same on all of them. The
// first, which brings memory and connections up, does not count, unless most_runs is 1: then it is one of two that do.
// After an error of `act` a rank runs nothing more, but meets the others until all are told.
Result<Point> Calibrator::measure(const std::string& what, FunctionRef<Status()> act, int calls,
                                  std::int64_t most_runs) {
  if (options_.progress) options_.progress(std::min(1.0, points_done_ / points_), what);
  ++points_done_;
  std::vector<std::int64_t> times;
  Status acted;
  const auto time_once = [&]() -> Status {
    if (const Status met = barrier(); !met.ok()) return acted.ok() ? met : acted;
    const std::int64_t start_ns = clock_->now_ns();
    for (int i = 0; i < calls && acted.ok(); ++i) acted = act();
    times.push_back(std::max<std::int64_t>(0, clock_->now_ns() - start_ns));
    return {};
  };
  const auto failed = [&]() -> std::int64_t { return acted.ok() ? 0 : communicator_->rank() + 1; };
  CORTADO_RETURN_IF_ERROR(time_once().with_context(what));
  const std::int64_t first_own[] = {times[0], clock_->now_ns() - start_ns_, failed()};
  CORTADO_ASSIGN_OR_RETURN(const std::vector<std::int64_t> first, longest(first_own));
  CORTADO_RETURN_IF_ERROR(told_of(what, acted, first[2]));
  left_ns_ = options_.budget_s * 1e9 - static_cast<double>(first[1]);
  share_ns_ = std::max(0.0, left_ns_) / std::max(1.0, points_ - points_done_ + 1);
  const double fitting = share_ns_ / static_cast<double>(std::max<std::int64_t>(1, first[0]));
  const auto most = static_cast<double>(most_runs);
  const auto runs = static_cast<std::int64_t>(std::clamp(fitting, std::min(most, double{kFewestRuns}), most));
  if (most_runs > 1) times.clear();
  for (std::int64_t i = 0; i < runs; ++i) CORTADO_RETURN_IF_ERROR(time_once().with_context(what));
  std::sort(times.begin(), times.end());
  const auto at = [&](double share) {
    return times[static_cast<std::size_t>(share * static_cast<double>(times.size() - 1) + 0.5)];
  };
  // Of two the shorter one: what disturbs only adds.
  const std::int64_t own[] = {times[(times.size() - 1) / 2], at(0.9) - at(0.1), clock_->now_ns() - start_ns_, failed()};
  CORTADO_ASSIGN_OR_RETURN(const std::vector<std::int64_t> of_ranks, longest(own));
  CORTADO_RETURN_IF_ERROR(told_of(what, acted, of_ranks[3]));
  left_ns_ = options_.budget_s * 1e9 - static_cast<double>(of_ranks[2]);
  return Point{.median_ns = of_ranks[0] / calls, .spread_ns = of_ranks[1] / calls, .runs = std::ssize(times)};
}

Status Calibrator::told_of(const std::string& what, const Status& own, std::int64_t failed_rank_plus_1) const {
  if (!own.ok()) return own.with_context("rank " + std::to_string(communicator_->rank()) + ", " + what);
  if (failed_rank_plus_1 == 0) return {};
  return make_error(StatusCode::kPeerFailed, "%s: rank %lld could not, and says why", what.c_str(),
                    static_cast<long long>(failed_rank_plus_1 - 1));
}

Status Calibrator::on_all_ranks(const std::string& what, const Status& own) {
  const std::int64_t failed[] = {own.ok() ? 0 : communicator_->rank() + 1};
  CORTADO_ASSIGN_OR_RETURN(const std::vector<std::int64_t> of_all, longest(failed));
  return told_of(what, own, of_all[0]);
}

// Whether the next size, in runs of so many calls, fits into a point's share and into what is left. As long as it is
// not the size that counts, the curve would say nothing of larger ones.
bool Calibrator::is_worth_it(const Curve& curve, int calls) const {
  if (curve.times.sizes.size() < kFewestSizes) return true;
  const auto at_least_ns =
      static_cast<double>(calls * curve.times.times_ns.back() * (is_of_size(curve.times) ? kFactor : kOfSize));
  return at_least_ns <= std::min(kLargestShare * share_ns_, left_ns_ / (1 + kFewestRuns));
}

Result<Cluster> Calibrator::run() {
  start_ns_ = clock_->now_ns();
  CORTADO_RETURN_IF_ERROR(find_device_codecs());
  Topology topology;
  if (options_.topology.has_value()) {
    topology = *options_.topology;
  } else {
    const Result<std::optional<LauncherPlace>> place = launcher_place();
    CORTADO_RETURN_IF_ERROR(on_all_ranks("the launcher's variables", place.status()));
    CORTADO_ASSIGN_OR_RETURN(topology, agree_on_topology(communicator_, place.value(), timeout_));
  }
  CORTADO_ASSIGN_OR_RETURN(const ClusterIdentity identity,
                           cluster_identity(communicator_, options_.transport_version, timeout_));
  CORTADO_ASSIGN_OR_RETURN(const LevelCommunicators levels, LevelCommunicators::create(communicator_, topology));
  CORTADO_ASSIGN_OR_RETURN(Cluster cluster, start(topology, identity));
  const int count = static_cast<int>(topology.levels.size());
  const LevelRange flat = {0, count - 1};
  const auto is_flat = [&](const ClusterRange& range) { return range.levels == flat; };
  if (count > 1 && std::none_of(cluster.ranges.begin(), cluster.ranges.end(), is_flat)) {
    cluster.ranges.emplace_back().levels = flat;
  }
  count_points(cluster);

  if (cluster.name.empty() || options_.name != CalibrateOptions().name) cluster.name = options_.name;
  cluster.description = "measured by cortado calibrate";
  // First what is quick, so that the links get what is left of the time.
  CORTADO_RETURN_IF_ERROR(measure_packing(&cluster));
  CORTADO_RETURN_IF_ERROR(measure_copies(&cluster));
  for (const std::string& spec : options_.codecs) {
    CORTADO_RETURN_IF_ERROR(measure_codec(spec, OpDevice::kCpu, &cluster.codecs));
  }
  for (const std::string& spec : device_codecs_) {
    CORTADO_RETURN_IF_ERROR(measure_codec(spec, OpDevice::kGpu, &cluster.codecs));
  }
  CORTADO_RETURN_IF_ERROR(measure_contention(&cluster));
  CORTADO_RETURN_IF_ERROR(measure_contention_on_device(&cluster));
  std::int64_t inside = 1;  // ranks of one unit of the levels below
  for (int l = 0; l < count; ++l) {
    ClusterLevel& level = cluster.levels[static_cast<std::size_t>(l)];
    Communicator* group = levels.of({l, l});
    CORTADO_RETURN_IF_ERROR(measure_collectives(group, level.name, inside, &level.collectives, &level.unknown));
    CORTADO_RETURN_IF_ERROR(measure_overlap(group, inside, &level));
    CORTADO_RETURN_IF_ERROR(measure_sums(group, inside, &level));
    inside *= level.ranks;
  }
  for (ClusterRange& range : cluster.ranges) {
    if (!is_flat(range)) continue;  // of a file that has more
    CORTADO_RETURN_IF_ERROR(measure_collectives(communicator_, "flat", 1, &range.collectives, &range.unknown));
  }
  const auto flat_range = std::find_if(cluster.ranges.begin(), cluster.ranges.end(), is_flat);
  const bool has_range = flat_range != cluster.ranges.end();
  const CollectiveCurves& of_all = has_range ? flat_range->collectives : cluster.levels.back().collectives;
  CORTADO_RETURN_IF_ERROR(measure_starts(of_all, &cluster));
  CORTADO_RETURN_IF_ERROR(measure_transfers(of_all, &cluster));
  const std::int64_t elapsed[] = {clock_->now_ns() - start_ns_};
  CORTADO_ASSIGN_OR_RETURN(const std::vector<std::int64_t> longest_ns, longest(elapsed));
  cluster.unknown["/calibration_ns"] = std::to_string(longest_ns[0]);
  CORTADO_RETURN_IF_ERROR(cluster.check());
  if (options_.progress) options_.progress(1, "");
  return cluster;
}

Result<Cluster> calibrate(Communicator* communicator, const CalibrateOptions& options, const Clock* clock) {
  if (!(options.budget_s > 0) || !(options.budget_s <= 1e6)) {
    return make_error(StatusCode::kInvalidArgument, "calibrate: budget_s must be above 0 and at most 1e6, got %g",
                      options.budget_s);
  }
  const auto check_largest = [](const char* name, std::int64_t value, std::int64_t least) -> Status {
    if (value >= least && value <= std::int64_t{1} << 34) return {};
    return make_error(StatusCode::kInvalidArgument, "calibrate: %s must be from %lld to 2^34, got %lld", name,
                      static_cast<long long>(least), static_cast<long long>(value));
  };
  CORTADO_RETURN_IF_ERROR(check_largest("max_bytes", options.max_bytes, kSmallestBytes));
  CORTADO_RETURN_IF_ERROR(check_largest("max_elems", options.max_elems, kSmallestElems));
  if (options.collectives.empty()) {
    return make_error(StatusCode::kInvalidArgument, "calibrate: expected collectives to measure, got none");
  }
  for (const std::string& spec : options.codecs) {
    CORTADO_RETURN_IF_ERROR(make_codec(spec).status().with_context("calibrate: codecs"));
  }
  CalibrateOptions canonical = options;
  for (std::string& spec : canonical.codecs) spec = canonical_codec(spec);
  Result<Cluster> measured = Calibrator(communicator, canonical, clock).run();
  // What came damaged may have come so to this rank alone, and the others measure on.
  if (measured.status().code() == StatusCode::kCorruptData) communicator->abandon(measured.status().message());
  return measured;
}

Result<ClusterIdentity> cluster_identity(Communicator* communicator, const std::string& transport_version,
                                         std::chrono::nanoseconds timeout) {
  constexpr std::size_t kTextBytes = 160;
  std::array<char, kTextBytes> own{};
  const std::string kind = host_kind();
  std::memcpy(own.data(), kind.data(), std::min(kind.size(), kTextBytes - 1));
  using Text = std::array<char, kTextBytes>;
  CORTADO_ASSIGN_OR_RETURN(std::vector<Text> all,
                           gather_checked(communicator, "machines", std::span<const Text>(&own, 1), timeout));
  std::map<std::string, int> ranks_of;
  for (std::array<char, kTextBytes>& text : all) {
    text.back() = '\0';
    ++ranks_of[text.data()];
  }
  ClusterIdentity identity;
  for (const auto& [text, ranks] : ranks_of) {
    identity.fingerprint += (identity.fingerprint.empty() ? "" : "; ") + std::to_string(ranks) + " ranks on " + text;
  }
  // Versions may differ between ranks: rank 0's stands for all, so that all decide alike.
  const std::string of_own = communicator->name() + (transport_version.empty() ? "" : ", " + transport_version);
  CORTADO_ASSIGN_OR_RETURN(identity.communicator, text_of_rank_0(communicator, of_own, timeout));
  return identity;
}

Status check_cluster_is_of(const Cluster& cluster, const ClusterIdentity& identity, const Topology& topology) {
  const auto refuse_as_foreign = [](const char* place, const std::string& expected, const std::string& found) {
    return make_error(StatusCode::kMismatch,
                      "%s: expected \"%s\", as here, got \"%s\": the file was measured elsewhere", place,
                      expected.c_str(), found.c_str());
  };
  if (cluster.fingerprint != identity.fingerprint) {
    return refuse_as_foreign("$.host.fingerprint", identity.fingerprint, cluster.fingerprint);
  }
  if (cluster.communicator != identity.communicator) {
    return refuse_as_foreign("$.host.communicator", identity.communicator, cluster.communicator);
  }
  const auto levels_text = [](const Topology& of) {
    std::string text;
    for (const TopologyLevel& level : of.levels) {
      text += (text.empty() ? "" : " x ") + std::to_string(level.ranks) + " " + level.name;
    }
    return text;
  };
  if (!(cluster.topology() == topology)) {
    return refuse_as_foreign("$.levels", levels_text(topology), levels_text(cluster.topology()));
  }
  return {};
}

}  // namespace cortado
