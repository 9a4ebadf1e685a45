// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/calibrate.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <thread>

#include "collective/agreement.h"
#include "collective/collective_call.h"
#include "core/aligned_buffer.h"
#include "core/check.h"
#include "core/checksum.h"
#include "core/differences.h"
#include "core/finite.h"
#include "core/linalg.h"
#include "core/philox.h"
#include "core/seconds.h"
#include "cortado/codec.h"
#include "profile/host.h"
#include "profile/places.h"

namespace cortado {

namespace {

constexpr std::int64_t kFewestRuns = 2, kMostRuns = 15;
constexpr std::int64_t kMostCodecRuns = 5;  // codecs take little else than their time; links shall have what is left
constexpr std::int64_t kFactor = 16;        // from size to size
constexpr std::int64_t kSmallestBytes = 4096, kSmallestElems = 1024;
// Beyond so many times the smallest size's time it is the size that counts, and time grows with it.
constexpr std::int64_t kOfSize = 3;
constexpr double kLargestShare = 2;  // of a point's share of the budget, for one run
// Of the whole budget, for one run of a collective: links are what is least known, and come last.
constexpr double kShareOfBudget = 0.04;
// What most travels by has one more size where that was not enough, so many times the last one, in two runs, if these
// take at most this share of what is left but for the sizes that all have: the first bytes of a transfer are not what
// more of them take, as connections warm up and shapers let bursts through.
constexpr std::int64_t kSmallFactor = 4;
constexpr double kShareOfLeft = 0.5;
// The transfer that computation runs beside costs some dozen times what it takes: of what is left of the budget, or a
// quarter of all too much.
constexpr double kTimesBeside = 15, kShareBeside = 0.02;
constexpr double kOutlasts = 1.5;  // so much longer than the transfer computation takes, alone
constexpr double kTransfersOfOverlap = 2 * 2 * (1 + kFewestRuns);  // two in turn and two at once, in each run
constexpr std::size_t kFewestSizes = 2;
constexpr std::int64_t kProductSide = 192, kMostProducts = 10000;
// How often a tensor is packed in one run: ranks that share cores get turns of milliseconds, and what ends
// within one seems to have the core for itself.
constexpr int kPackings = 4;

// Two sizes or more, the last one `largest`. They lie a factor of two apart at least: two that are close would tell
// nothing of the slope.
std::vector<std::int64_t> sizes_up_to(std::int64_t smallest, std::int64_t largest) {
  std::vector<std::int64_t> sizes;
  for (std::int64_t size = std::min(smallest, largest / 2); size <= largest / 2; size *= kFactor) sizes.push_back(size);
  sizes.push_back(largest);
  return sizes;
}

// How often a collective is called in one run. Ranks leave a barrier one after the other, by milliseconds where they
// share cores; small collectives are hardly longer, so several of them in a row are timed. Those of the size that
// engines have several of under way are timed at once: alone, a gather of 1 MiB over Gloo took 86 ms at 100 Mb/s among
// four ranks and 67 between two, one of four at once 70 and 50, of which the wire's are 63 and 42.
constexpr std::int64_t kMostBytesInARow = 128 << 10, kMostBytesAtOnce = 2 << 20;
constexpr int kAtOnce = 4;
int calls_in_a_run(std::int64_t bytes) {
  if (bytes > kMostBytesInARow) return bytes <= kMostBytesAtOnce ? kAtOnce : 1;
  return bytes <= (16 << 10) ? 10 : 5;
}

bool may_have_one_more(OpKind kind) { return kind == OpKind::kAllReduce || kind == OpKind::kAllGather; }

struct Point {
  std::int64_t median_ns = 0, spread_ns = 0, runs = 0;
};

struct Curve {
  TimeCurve times;
  std::vector<std::int64_t> spreads_ns, runs;

  void add(std::int64_t size, const Point& point) {
    // A larger size takes no less; where it was measured so, the machine was busy at the smaller one.
    const std::int64_t before = times.times_ns.empty() ? 0 : times.times_ns.back();
    times.sizes.push_back(size);
    times.times_ns.push_back(std::max(before, point.median_ns));
    spreads_ns.push_back(point.spread_ns);
    runs.push_back(point.runs);
  }
};

std::string list_text(const std::vector<std::int64_t>& values) {
  std::string text = "[";
  for (const std::int64_t value : values) text += (text.size() > 1 ? ", " : "") + std::to_string(value);
  return text + "]";
}

void note_spread(const std::string& pointer, const Curve& curve, UnknownFields* unknown) {
  (*unknown)[pointer + "/spread_ns"] = list_text(curve.spreads_ns);
  (*unknown)[pointer + "/runs"] = list_text(curve.runs);
}

// A call whose size, as cluster.h counts it, is about `bytes`, and that size.
struct SizedCall {
  CollectiveCall call;
  std::int64_t bytes = 0;
};

SizedCall make_call(OpKind kind, std::int64_t bytes, int ranks, void* sent, void* received) {
  const auto item = static_cast<std::int64_t>(sizeof(float));
  const bool in_blocks = kind != OpKind::kAllReduce && kind != OpKind::kReduce && kind != OpKind::kBroadcast;
  CollectiveCall call{.kind = collective_of(kind), .dtype = DType::kFloat32, .sent = sent, .received = received};
  call.elems = in_blocks ? std::max<std::int64_t>(1, bytes / (item * ranks)) : bytes / item;
  if (!in_blocks) call.received = sent;  // in place
  return {call, call.elems * item * (in_blocks ? ranks : 1)};
}

bool is_cpu_curve(const CodecTimes& times, const std::string& spec) {
  return times.codec == spec && times.device == OpDevice::kCpu && times.threads == 1;
}

// In both directions.
bool is_measured(const std::vector<CodecTimes>& times, const std::string& spec) {
  return std::count_if(times.begin(), times.end(),
                       [&](const CodecTimes& entry) { return is_cpu_curve(entry, spec); }) == 2;
}

// Stands for computation.
class MatrixProduct {
 public:
  Status run() {
    multiply(Operand::kAsIs, Operand::kAsIs, kProductSide, kProductSide, kProductSide, a_.data(), b_.data(), c_.data());
    return {};
  }

 private:
  static constexpr std::size_t kElems = static_cast<std::size_t>(kProductSide * kProductSide);
  AlignedBuffer<float> a_{kElems}, b_{kElems}, c_{kElems};
};

bool is_of_size(const TimeCurve& curve) { return curve.times_ns.back() >= kOfSize * curve.times_ns.front(); }

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
  Result<Cluster> start(const Topology& topology, const ClusterIdentity& identity);
  void count_points(const Cluster& cluster);
  template <typename Act>
  Result<Point> measure(const std::string& what, Act&& act, int calls = 1, std::int64_t most_runs = kMostRuns);
  bool is_worth_it(const Curve& curve, int calls = 1) const;
  bool is_call_worth_it(const Curve& curve, int calls) const;
  bool has_time_for_one_more(const Curve& curve, std::int64_t groups) const;
  void continue_as_all_reduce(const CollectiveCurves& curves, Curve* curve) const;

  Status measure_collectives(Communicator* group, const std::string& level, std::int64_t groups,
                             CollectiveCurves* curves, UnknownFields* unknown);
  Status measure_overlap(Communicator* group, std::int64_t groups, ClusterLevel* level);
  Status measure_transfers(const CollectiveCurves& curves, Cluster* cluster);
  std::array<std::int64_t, 2> packed_sizes() const {
    const std::vector<std::int64_t> sizes = sizes_up_to(kSmallestElems, options_.max_elems);
    return {sizes.front(), sizes.back()};
  }
  bool measures_packing(const Cluster& cluster) const {
    return !options_.codecs.empty() && (cluster.pack.sizes.empty() || cluster.unpack.sizes.empty());
  }
  Status measure_packing(Cluster* cluster);
  Status measure_codec(const std::string& spec, std::vector<CodecTimes>* times);
  Status measure_contention(Cluster* cluster);

  Communicator* communicator_;
  const CalibrateOptions& options_;
  const Clock* clock_;
  std::chrono::nanoseconds timeout_;
  std::int64_t start_ns_ = 0;
  double points_ = 1, points_done_ = 0;
  std::int64_t kinds_left_ = 0;  // of collectives, over all levels and ranges, that have no times yet
  double left_ns_ = 0;           // of the budget, the same on all ranks; below 0: it was not enough
  double share_ns_ = 0;          // for a point, of what is left
};

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
  const Status fits = check_cluster_is_of(known, identity, topology);
  if (fits.ok()) return known;
  if (options_.note) options_.note("measures everything: " + fits.message());
  return fresh;
}

void Calibrator::count_points(const Cluster& cluster) {
  std::size_t kept = 0, missing_collectives = 0, missing_codecs = 0, one_more = 0;
  std::size_t of_contention = options_.codecs.empty() ? 0 : 2;
  const bool has_all_reduce =
      std::count(options_.collectives.begin(), options_.collectives.end(), OpKind::kAllReduce) > 0;
  const bool measures_transfers =
      has_all_reduce && !cluster.transfers_slow_backward.has_value() && communicator_->world_size() > 1;
  const auto count = [&](const CollectiveCurves& curves) {
    for (const OpKind kind : options_.collectives) {
      ++(curves.contains(kind) ? kept : missing_collectives);
      one_more += !curves.contains(kind) && may_have_one_more(kind);
    }
  };
  for (const ClusterLevel& level : cluster.levels) {
    count(level.collectives);
    of_contention += level.overlap_time_share.has_value() ? 0 : 2;
  }
  for (const ClusterRange& range : cluster.ranges) count(range.collectives);
  for (const std::string& spec : options_.codecs) (is_measured(cluster.codecs, spec) ? kept : missing_codecs) += 2;
  kinds_left_ = static_cast<std::int64_t>(missing_collectives);
  points_ =
      static_cast<double>(one_more + missing_collectives * sizes_up_to(kSmallestBytes, options_.max_bytes).size() +
                          missing_codecs * sizes_up_to(kSmallestElems, options_.max_elems).size() +
                          (measures_packing(cluster) ? 2 * packed_sizes().size() : 0) +
                          (options_.contention ? of_contention : 0) + (measures_transfers ? 4 : 0));
  left_ns_ = options_.budget_s * 1e9;
  share_ns_ = left_ns_ / std::max(1.0, points_);
  if (!options_.note || kept == 0) return;
  const std::size_t missing = missing_collectives + missing_codecs;
  options_.note("keeps " + std::to_string(kept) + " of " + std::to_string(kept + missing) +
                " curves, which are known; measures " + std::to_string(missing));
}

// Times some runs of `calls` calls of `act` on all ranks at once; the number of runs is the same on all of them. The
// first, which brings memory and connections up, does not count, unless most_runs is 1: then it is one of two that do.
template <typename Act>
Result<Point> Calibrator::measure(const std::string& what, Act&& act, int calls, std::int64_t most_runs) {
  if (options_.progress) options_.progress(std::min(1.0, points_done_ / points_), what);
  ++points_done_;
  std::vector<std::int64_t> times;
  const auto time_once = [&]() -> Status {
    CORTADO_RETURN_IF_ERROR(barrier());
    const std::int64_t start_ns = clock_->now_ns();
    for (int i = 0; i < calls; ++i) CORTADO_RETURN_IF_ERROR(act());
    times.push_back(std::max<std::int64_t>(0, clock_->now_ns() - start_ns));
    return {};
  };
  CORTADO_RETURN_IF_ERROR(time_once().with_context(what));
  const std::int64_t first_own[] = {times[0], clock_->now_ns() - start_ns_};
  CORTADO_ASSIGN_OR_RETURN(const std::vector<std::int64_t> first, longest(first_own));
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
  const std::int64_t own[] = {times[(times.size() - 1) / 2], at(0.9) - at(0.1), clock_->now_ns() - start_ns_};
  CORTADO_ASSIGN_OR_RETURN(const std::vector<std::int64_t> of_ranks, longest(own));
  left_ns_ = options_.budget_s * 1e9 - static_cast<double>(of_ranks[2]);
  return Point{.median_ns = of_ranks[0] / calls, .spread_ns = of_ranks[1] / calls, .runs = std::ssize(times)};
}

// Whether the next size, in runs of so many calls, fits into a point's share and into what is left. As long as it is
// not the size that counts, the curve would say nothing of larger ones.
bool Calibrator::is_worth_it(const Curve& curve, int calls) const {
  if (curve.times.sizes.size() < kFewestSizes) return true;
  const auto at_least_ns =
      static_cast<double>(calls * curve.times.times_ns.back() * (is_of_size(curve.times) ? kFactor : kOfSize));
  return at_least_ns <= std::min(kLargestShare * share_ns_, left_ns_ / (1 + kFewestRuns));
}

// What a size `factor` times as large as the last one will take, in nanoseconds.
double expected_ns(const Curve& curve, std::int64_t factor) {
  const std::vector<std::int64_t>& times_ns = curve.times.times_ns;
  const std::int64_t last_ns = times_ns.back(), growth_ns = last_ns - times_ns[times_ns.size() - 2];
  return static_cast<double>(last_ns + factor * growth_ns);
}

// Of a collective: or whether it is cheap, and less than half a budget too much was spent. A link whose curve ends
// where latency does would be taken for several times as fast as it is.
bool Calibrator::is_call_worth_it(const Curve& curve, int calls) const {
  if (is_worth_it(curve, calls)) return true;
  const double budget_ns = options_.budget_s * 1e9;
  return left_ns_ > -budget_ns / 2 && calls * expected_ns(curve, kFactor) <= kShareOfBudget * budget_ns;
}

// `groups`: as in measure_collectives(). The kinds without times are taken for as slow as this one.
bool Calibrator::has_time_for_one_more(const Curve& curve, std::int64_t groups) const {
  std::int64_t for_others_ns = 0;
  for (std::size_t i = 0; i < kFewestSizes; ++i) {
    for_others_ns += (kinds_left_ - 1) * calls_in_a_run(curve.times.sizes[i] / groups) * curve.times.times_ns[i];
  }
  const double free_ns = left_ns_ - static_cast<double>((1 + kFewestRuns) * for_others_ns);
  return 2 * expected_ns(curve, kSmallFactor) <= kShareOfLeft * free_ns;
}

// ---- collectives ---------------------------------------------------------------------------------------------------

// Those that `curves` lacks. `groups` ranks of an inner unit run each collective together, over the unit's one link.
Status Calibrator::measure_collectives(Communicator* group, const std::string& level, std::int64_t groups,
                                       CollectiveCurves* curves, UnknownFields* unknown) {
  const auto blocks = static_cast<std::size_t>(group->world_size());
  const auto values_of = [&](std::int64_t bytes) {
    return static_cast<std::size_t>(bytes) / sizeof(float) + 1 + blocks;
  };
  const std::size_t values =
      std::max(values_of(options_.max_bytes), kAtOnce * values_of(std::min(options_.max_bytes, kMostBytesAtOnce)));
  AlignedBuffer<float> sent(values), received(values);
  for (const OpKind kind : options_.collectives) {
    if (curves->contains(kind)) continue;
    Curve curve;
    const auto add_point = [&](std::int64_t bytes, int calls, std::int64_t most_runs) -> Status {
      const auto call_at = [&](std::size_t at) {
        return make_call(kind, bytes, group->world_size(), sent.data() + at, received.data() + at);
      };
      const int at_once = bytes > kMostBytesInARow ? calls : 1;
      const std::int64_t size = call_at(0).bytes;
      std::string what = std::string(op_kind_name(kind)) + "@" + level + ", " + std::to_string(size) + " bytes";
      if (at_once > 1) what += ", " + std::to_string(at_once) + " at once";
      const auto act = [&]() -> Status {
        std::vector<WorkId> works;
        Status status;
        while (status.ok() && std::ssize(works) < at_once) {
          const Result<WorkId> work = group->start(call_at(works.size() * values_of(bytes)).call);
          status = work.status();
          if (work.ok()) works.push_back(work.value());
        }
        for (const WorkId work : works) {  // all of them, as they hold the buffers
          const Status ended = group->wait(work, timeout_);
          if (status.ok()) status = ended;
        }
        return status;
      };
      CORTADO_ASSIGN_OR_RETURN(const Point of_all, measure(what, act, calls / at_once, most_runs));
      curve.add(size * groups, {of_all.median_ns / at_once, of_all.spread_ns / at_once, of_all.runs});
      return {};
    };
    for (const std::int64_t bytes : sizes_up_to(kSmallestBytes, options_.max_bytes)) {
      const int calls = calls_in_a_run(bytes);
      if (is_call_worth_it(curve, calls)) {
        CORTADO_RETURN_IF_ERROR(add_point(bytes, calls, kMostRuns));
      } else if (is_call_worth_it(curve, 1)) {
        CORTADO_RETURN_IF_ERROR(add_point(bytes, 1, kMostRuns));
      } else {
        ++points_done_;
      }
    }
    if (may_have_one_more(kind)) {
      const std::int64_t next = curve.times.sizes.back() / groups * kSmallFactor;
      if (next <= options_.max_bytes && has_time_for_one_more(curve, groups)) {
        CORTADO_RETURN_IF_ERROR(add_point(next, 1, 1));
      } else {
        ++points_done_;
      }
    }
    --kinds_left_;
    continue_as_all_reduce(*curves, &curve);
    note_spread("/collectives/" + std::string(op_kind_name(kind)), curve, unknown);
    (*curves)[kind] = std::move(curve.times);
  }
  return {};
}

// A curve that ends where latency does would promise that more bytes take no longer, and one that ends soon after it
// has too steep an end. It goes on to the last size of all-reduces, if these tell, in proportion to them: between half
// of what they take, as every byte of theirs travels twice, and all of it.
void Calibrator::continue_as_all_reduce(const CollectiveCurves& curves, Curve* curve) const {
  const auto all_reduce = curves.find(OpKind::kAllReduce);
  if (all_reduce == curves.end()) return;
  const TimeCurve& known = all_reduce->second;
  if (!is_of_size(known) || known.sizes.back() < 2 * curve->times.sizes.back()) return;
  const std::int64_t most_ns = known.times_ns.back(), same_ns = known.at(curve->times.sizes.back());
  const double growth = static_cast<double>(most_ns) / static_cast<double>(std::max<std::int64_t>(1, same_ns));
  const double in_proportion = growth * static_cast<double>(curve->times.times_ns.back());
  const double most = static_cast<double>(most_ns);
  curve->add(known.sizes.back(), {.median_ns = static_cast<std::int64_t>(std::clamp(in_proportion, most / 2, most))});
}

// Two of them at once against one after the other, at the largest size that was measured and fits into what is left:
// there it is the link's bandwidth that counts.
Status Calibrator::measure_overlap(Communicator* group, std::int64_t groups, ClusterLevel* level) {
  if (!options_.contention || level->overlap_time_share.has_value()) return {};
  if (group->world_size() == 1 || level->collectives.empty()) return {};
  const auto all_reduce = level->collectives.find(OpKind::kAllReduce);
  const auto& [kind, curve] = all_reduce != level->collectives.end() ? *all_reduce : *level->collectives.begin();
  std::size_t size = curve.sizes.size() - 1;
  const double most_ns = kShareOfLeft * left_ns_ / kTransfersOfOverlap;
  while (size > 0 && static_cast<double>(curve.times_ns[size]) > most_ns) --size;
  const std::int64_t bytes = curve.sizes[size] / groups;
  const std::size_t values =
      static_cast<std::size_t>(bytes) / sizeof(float) + static_cast<std::size_t>(group->world_size());
  std::array<AlignedBuffer<float>, 2> sent = {AlignedBuffer<float>(values), AlignedBuffer<float>(values)};
  std::array<AlignedBuffer<float>, 2> received = {AlignedBuffer<float>(values), AlignedBuffer<float>(values)};
  const OpKind measured = kind;
  const auto start = [&](std::size_t which) {
    return group->start(
        make_call(measured, bytes, group->world_size(), sent[which].data(), received[which].data()).call);
  };
  const std::string what = "two of " + std::string(op_kind_name(kind)) + "@" + level->name;
  CORTADO_ASSIGN_OR_RETURN(const Point in_turn, measure(what + " in turn", [&]() -> Status {
                             for (const std::size_t which : {0, 1}) {
                               CORTADO_ASSIGN_OR_RETURN(const WorkId work, start(which));
                               CORTADO_RETURN_IF_ERROR(group->wait(work, timeout_));
                             }
                             return {};
                           }));
  CORTADO_ASSIGN_OR_RETURN(const Point at_once, measure(what + " at once", [&]() -> Status {
                             CORTADO_ASSIGN_OR_RETURN(const WorkId first, start(0));
                             CORTADO_ASSIGN_OR_RETURN(const WorkId second, start(1));
                             CORTADO_RETURN_IF_ERROR(group->wait(first, timeout_));
                             return group->wait(second, timeout_);
                           }));
  const double share = static_cast<double>(std::max<std::int64_t>(1, at_once.median_ns)) /
                       static_cast<double>(std::max<std::int64_t>(1, in_turn.median_ns));
  level->overlap_time_share = std::clamp(std::round(1000 * share) / 1000, 0.001, 100.0);
  return {};
}

// What computation loses to a transfer that runs beside it: time that is added to enough products to outlast the
// transfer, as a share of what the transfer takes alone. Not of transfers that are mostly latency: what they seem to
// take is how late ranks leave a barrier.
Status Calibrator::measure_transfers(const CollectiveCurves& curves, Cluster* cluster) {
  const auto all_reduce = curves.find(OpKind::kAllReduce);
  if (cluster->transfers_slow_backward.has_value() || communicator_->world_size() == 1) return {};
  if (all_reduce == curves.end()) return {};
  const TimeCurve& curve = all_reduce->second;
  const double most_ns = std::max(left_ns_ / kTimesBeside, kShareBeside * options_.budget_s * 1e9);
  // The larger, the less it matters that steps of the machine vary.
  std::int64_t bytes = curve.sizes.back();
  while (bytes > curve.sizes[0] && static_cast<double>(curve.at(bytes)) > most_ns) bytes /= 2;
  if (curve.at(bytes) < kOfSize * curve.times_ns[0] || curve.at(bytes) == 0) return {};
  AlignedBuffer<float> values(static_cast<std::size_t>(bytes) / sizeof(float) + 1);
  const CollectiveCall call =
      make_call(OpKind::kAllReduce, bytes, communicator_->world_size(), values.data(), values.data()).call;
  // The curve's may be of several at once.
  CORTADO_ASSIGN_OR_RETURN(const Point transfer,
                           measure("all_reduce of " + std::to_string(bytes) + " bytes alone", [&]() -> Status {
                             CORTADO_ASSIGN_OR_RETURN(const WorkId work, communicator_->start(call));
                             return communicator_->wait(work, timeout_);
                           }));
  const std::int64_t transfer_ns = std::max<std::int64_t>(1, transfer.median_ns);

  MatrixProduct product;
  std::int64_t products = 1;
  const auto compute = [&]() -> Status {
    for (std::int64_t i = 0; i < products; ++i) CORTADO_RETURN_IF_ERROR(product.run());
    return {};
  };
  Point alone;
  for (;;) {
    CORTADO_ASSIGN_OR_RETURN(alone, measure("computation alone", compute));
    const double missing = kOutlasts * static_cast<double>(transfer_ns) / static_cast<double>(alone.median_ns + 1);
    if (missing <= 1) break;
    if (products == kMostProducts) return {};
    // A single one, just after a barrier, takes longer than many do.
    products = std::min(kMostProducts, static_cast<std::int64_t>(1.2 * missing * static_cast<double>(products)) + 1);
  }
  CORTADO_ASSIGN_OR_RETURN(const Point beside, measure("computation beside all_reduce", [&]() -> Status {
                             CORTADO_ASSIGN_OR_RETURN(const WorkId work, communicator_->start(call));
                             CORTADO_RETURN_IF_ERROR(compute());
                             return communicator_->wait(work, timeout_);
                           }));
  const double share = static_cast<double>(beside.median_ns - alone.median_ns) / static_cast<double>(transfer_ns);
  cluster->transfers_slow_backward = std::round(1000 * std::clamp(share, 0.0, 1.0)) / 1000;
  return {};
}

// ---- codecs --------------------------------------------------------------------------------------------------------

// What a plan's engine does to every gradient, encoded or not: into the bucket's buffer, scaled, and out of it, with a
// look for Inf and NaN.
Status Calibrator::measure_packing(Cluster* cluster) {
  if (!measures_packing(*cluster)) return {};
  const float scale = 1.0f / static_cast<float>(communicator_->world_size());
  Curve packing, unpacking;
  for (const std::int64_t elems : packed_sizes()) {
    AlignedBuffer<float> gradient(static_cast<std::size_t>(elems)), values(static_cast<std::size_t>(elems));
    const std::string size = ", " + std::to_string(elems) + " elements";
    CORTADO_ASSIGN_OR_RETURN(const Point in, measure(
                                                 "pack" + size,
                                                 [&]() -> Status {
                                                   for (std::size_t i = 0; i < values.size(); ++i)
                                                     values[i] = gradient[i] * scale;
                                                   return {};
                                                 },
                                                 kPackings));
    CORTADO_ASSIGN_OR_RETURN(const Point out, measure(
                                                  "unpack" + size,
                                                  [&]() -> Status {
                                                    for (std::size_t i = 0; i < values.size(); ++i)
                                                      gradient[i] = values[i] * scale;
                                                    CORTADO_CHECK(all_finite(values.data(), elems, DType::kFloat32),
                                                                  "nothing but zeros");
                                                    return {};
                                                  },
                                                  kPackings));
    packing.add(elems, in);
    unpacking.add(elems, out);
  }
  const auto keep = [&](const char* pointer, const Curve& curve, TimeCurve* times) {
    if (!times->sizes.empty()) return;  // known
    note_spread(pointer, curve, &cluster->unknown);
    *times = curve.times;
  };
  keep("/copies/pack", packing, &cluster->pack);
  keep("/copies/unpack", unpacking, &cluster->unpack);
  return {};
}

// What a rank's thread does for one tensor: beside encode and decode the passes of error feedback and, of payloads that
// are gathered, checks and sums; where codecs are fast these cost as much.
class CodecWork {
 public:
  CodecWork(const Codec& codec, std::int64_t elems)
      : codec_(codec),
        has_feedback_(!codec.row().traits.lossless && !codec.is_majority_vote()),
        is_gathered_(!codec.row().traits.linear),
        cols_(static_cast<std::int64_t>(std::sqrt(static_cast<double>(elems)))),
        rows_(elems / cols_),
        gradient_(size()),
        residual_(has_feedback_ ? size() : 0),
        values_(size()),
        decoded_(size()),
        sum_(is_gathered_ ? size() : 0),
        payload_(codec.max_payload_bytes(rows_, cols_, DType::kFloat32)),
        scratch_(codec.scratch_bytes(rows_, cols_, DType::kFloat32)) {
    philox_fill_normal(1, 0, 0, gradient_.data(), rows_ * cols_);
    for (float& value : gradient_) value *= 1e-3f;
  }

  std::int64_t elems() const { return rows_ * cols_; }

  Status encode() {
    const std::size_t count = size();
    const float* input = gradient_.data();
    if (has_feedback_) {
      for (std::size_t i = 0; i < count; ++i) values_[i] = gradient_[i] + residual_[i];
      input = values_.data();
    }
    CORTADO_ASSIGN_OR_RETURN(
        payload_bytes_, codec_.encode({input, DType::kFloat32, rows_, cols_}, {.seed = 1, .step = step_++, .tensor = 1},
                                      payload_.span(), scratch_.span()));
    if (is_gathered_) check_ = checksum_64(payload());
    if (!has_feedback_) return {};
    CORTADO_RETURN_IF_ERROR(decode_alone());
    (void)take_differences(values_.data(), decoded_.data(), elems(), residual_.data());
    return {};
  }

  Status decode() {
    CORTADO_CHECK(!is_gathered_ || checksum_64(payload()) == check_, "nothing has touched it");
    CORTADO_RETURN_IF_ERROR(decode_alone());
    for (std::size_t i = 0; i < sum_.size(); ++i) sum_[i] += decoded_[i];
    return {};
  }

 private:
  std::size_t size() const { return static_cast<std::size_t>(rows_ * cols_); }
  std::span<const std::byte> payload() { return payload_.span().first(payload_bytes_); }
  Status decode_alone() {
    return codec_.decode(payload(), {decoded_.data(), DType::kFloat32, rows_, cols_}, scratch_.span());
  }

  const Codec& codec_;
  bool has_feedback_, is_gathered_;
  std::int64_t cols_, rows_;
  AlignedBuffer<float> gradient_, residual_, values_, decoded_, sum_;
  AlignedBuffer<std::byte> payload_, scratch_;
  std::uint64_t payload_bytes_ = 0, step_ = 0, check_ = 0;
};

Status Calibrator::measure_codec(const std::string& spec, std::vector<CodecTimes>* times) {
  if (is_measured(*times, spec)) return {};
  std::erase_if(*times, [&](const CodecTimes& entry) { return is_cpu_curve(entry, spec); });
  CORTADO_ASSIGN_OR_RETURN(const std::unique_ptr<Codec> codec, make_codec(spec));
  Curve encode, decode;
  for (const std::int64_t elems : sizes_up_to(kSmallestElems, options_.max_elems)) {
    if (!is_worth_it(encode)) {
      points_done_ += 2;
      continue;
    }
    CodecWork work(*codec, elems);
    const std::string size = ", " + std::to_string(work.elems()) + " elements";
    CORTADO_ASSIGN_OR_RETURN(const Point encoding,
                             measure(
                                 "encode " + spec + size, [&] { return work.encode(); }, 1, kMostCodecRuns));
    CORTADO_ASSIGN_OR_RETURN(const Point decoding,
                             measure(
                                 "decode " + spec + size, [&] { return work.decode(); }, 1, kMostCodecRuns));
    encode.add(work.elems(), encoding);
    decode.add(work.elems(), decoding);
  }
  for (const auto& [direction, curve] : {std::pair(OpKind::kEncode, &encode), std::pair(OpKind::kDecode, &decode)}) {
    CodecTimes entry;
    entry.codec = spec;
    entry.device = OpDevice::kCpu;
    entry.direction = direction;
    entry.curve = curve->times;
    note_spread("", *curve, &entry.unknown);
    times->push_back(std::move(entry));
  }
  return {};
}

// The codec that takes longest to encode a value of its largest tensor; empty: none was measured. A file that is kept
// may have codecs that are not here.
std::string slowest_of(const std::vector<CodecTimes>& times) {
  std::string slowest;
  double most = -1;
  for (const CodecTimes& entry : times) {
    if (entry.direction != OpKind::kEncode || !is_cpu_curve(entry, entry.codec)) continue;
    const double ns = static_cast<double>(entry.curve.times_ns.back()) / static_cast<double>(entry.curve.sizes.back());
    if (ns > most && make_codec(entry.codec).ok()) most = ns, slowest = entry.codec;
  }
  return slowest;
}

// By how much a product of matrices slows down while another thread encodes with the slowest codec, which computation
// would meet most.
Status Calibrator::measure_contention(Cluster* cluster) {
  if (!options_.contention) return {};
  const std::string spec = slowest_of(cluster->codecs);
  if (spec == cluster->cpu_codec) return {};  // known; or there is none
  CORTADO_ASSIGN_OR_RETURN(const std::unique_ptr<Codec> codec, make_codec(spec));
  CodecWork work(*codec, std::min<std::int64_t>(options_.max_elems, 1 << 18));
  MatrixProduct matrices;
  const auto product = [&] { return matrices.run(); };
  CORTADO_ASSIGN_OR_RETURN(const Point alone, measure("matrix product", product));
  std::atomic<bool> stop = false;
  Status encoded;
  std::thread encoder([&] {
    while (!stop && encoded.ok()) encoded = work.encode();
  });
  const Result<Point> beside = measure("matrix product beside " + spec, product);
  stop = true;
  encoder.join();
  CORTADO_RETURN_IF_ERROR(beside.status());
  CORTADO_RETURN_IF_ERROR(encoded);
  const double slower =
      static_cast<double>(alone.median_ns) / static_cast<double>(std::max<std::int64_t>(1, beside.value().median_ns));
  cluster->cpu_codec = spec;
  cluster->cpu_codec_slows_backward = std::round(1000 * std::clamp(1 - slower, 0.0, 1.0)) / 1000;
  return {};
}

// ---- all of it -----------------------------------------------------------------------------------------------------

Result<Cluster> Calibrator::run() {
  start_ns_ = clock_->now_ns();
  Topology topology;
  if (options_.topology.has_value()) {
    topology = *options_.topology;
  } else {
    CORTADO_ASSIGN_OR_RETURN(const std::optional<LauncherPlace> place, launcher_place());
    CORTADO_ASSIGN_OR_RETURN(topology, agree_on_topology(communicator_, place, timeout_));
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
  for (const std::string& spec : options_.codecs) CORTADO_RETURN_IF_ERROR(measure_codec(spec, &cluster.codecs));
  CORTADO_RETURN_IF_ERROR(measure_contention(&cluster));
  std::int64_t inside = 1;  // ranks of one unit of the levels below
  for (int l = 0; l < count; ++l) {
    ClusterLevel& level = cluster.levels[static_cast<std::size_t>(l)];
    Communicator* group = levels.of({l, l});
    CORTADO_RETURN_IF_ERROR(measure_collectives(group, level.name, inside, &level.collectives, &level.unknown));
    CORTADO_RETURN_IF_ERROR(measure_overlap(group, inside, &level));
    inside *= level.ranks;
  }
  for (ClusterRange& range : cluster.ranges) {
    if (!is_flat(range)) continue;  // of a file that has more
    CORTADO_RETURN_IF_ERROR(measure_collectives(communicator_, "flat", 1, &range.collectives, &range.unknown));
  }
  const auto flat_range = std::find_if(cluster.ranges.begin(), cluster.ranges.end(), is_flat);
  const bool has_range = flat_range != cluster.ranges.end();
  CORTADO_RETURN_IF_ERROR(
      measure_transfers(has_range ? flat_range->collectives : cluster.levels.back().collectives, &cluster));
  const std::int64_t elapsed[] = {clock_->now_ns() - start_ns_};
  CORTADO_ASSIGN_OR_RETURN(const std::vector<std::int64_t> longest_ns, longest(elapsed));
  cluster.unknown["/calibration_ns"] = std::to_string(longest_ns[0]);
  CORTADO_RETURN_IF_ERROR(cluster.check());
  if (options_.progress) options_.progress(1, "");
  return cluster;
}

}  // namespace

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
  return Calibrator(communicator, options, clock).run();
}

Result<ClusterIdentity> cluster_identity(Communicator* communicator, const std::string& transport_version,
                                         std::chrono::nanoseconds timeout) {
  constexpr std::size_t kTextBytes = 160;
  std::array<char, kTextBytes> own{};
  const std::string kind = host_kind();
  std::memcpy(own.data(), kind.data(), std::min(kind.size(), kTextBytes - 1));
  std::vector<std::array<char, kTextBytes>> all(static_cast<std::size_t>(communicator->world_size()));
  CORTADO_RETURN_IF_ERROR(
      communicator->all_gather(std::as_bytes(std::span(own)), std::as_writable_bytes(std::span(all)), timeout));
  std::map<std::string, int> ranks_of;
  for (std::array<char, kTextBytes>& text : all) {
    text.back() = '\0';
    ++ranks_of[text.data()];
  }
  ClusterIdentity identity;
  for (const auto& [text, ranks] : ranks_of) {
    identity.fingerprint += (identity.fingerprint.empty() ? "" : "; ") + std::to_string(ranks) + " ranks on " + text;
  }
  identity.communicator = communicator->name() + (transport_version.empty() ? "" : ", " + transport_version);
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
