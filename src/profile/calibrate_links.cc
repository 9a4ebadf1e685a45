// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Of Calibrator: collectives, one by one, two at a time, and beside computation.
#include <cmath>

#include "collective/collective_call.h"
#include "core/check.h"
#include "core/keep_for_ever.h"
#include "profile/calibrator.h"

namespace cortado {

namespace {

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
constexpr std::int64_t kMostProducts = 10000;
constexpr double kMostSumFactor = 100;

// How often a collective is called in one run. Engines have several messages of these sizes under way, so four at once
// are timed: alone, a gather of 1 MiB over Gloo took 86 ms at 100 Mb/s among four ranks and 67 between two, one of four
// at once 70 and 50, of which the wire's are 63 and 42. Ranks leave a barrier one after the other, by milliseconds
// where they share cores; the smallest collectives are hardly longer, so two fours in a row are timed.
constexpr std::int64_t kMostBytesAtOnce = 2 << 20;
constexpr int kAtOnce = 4;
int calls_in_a_run(std::int64_t bytes) {
  if (bytes > kMostBytesAtOnce) return 1;
  return bytes > (16 << 10) ? kAtOnce : 2 * kAtOnce;
}

// A call whose size, as cluster.h counts it, is about `bytes`, and that size.
struct SizedCall {
  CollectiveCall call;
  std::int64_t bytes = 0;
};

SizedCall make_call(OpKind kind, std::int64_t bytes, int ranks, void* sent, void* received,
                    DType dtype = DType::kFloat32) {
  const auto item = static_cast<std::int64_t>(dtype_bytes(dtype));
  const bool in_blocks = kind != OpKind::kAllReduce && kind != OpKind::kReduce && kind != OpKind::kBroadcast;
  CollectiveCall call{.kind = collective_of(kind), .dtype = dtype, .sent = sent, .received = received};
  call.elems = in_blocks ? std::max<std::int64_t>(1, bytes / (item * ranks)) : bytes / item;
  if (!in_blocks) call.received = sent;  // in place
  return {call, call.elems * item * (in_blocks ? ranks : 1)};
}

// What a size `factor` times as large as the last one will take, in nanoseconds.
double expected_ns(const Curve& curve, std::int64_t factor) {
  const std::vector<std::int64_t>& times_ns = curve.times.times_ns;
  const std::int64_t last_ns = times_ns.back(), growth_ns = last_ns - times_ns[times_ns.size() - 2];
  return static_cast<double>(last_ns + factor * growth_ns);
}

}  // namespace

// Of a collective: or whether it is cheap, and less than half a budget too much was spent, or ten seconds. A link whose
// curve ends where latency does would be taken for several times as fast as it is.
bool Calibrator::is_call_worth_it(const Curve& curve, int calls) const {
  if (is_worth_it(curve, calls)) return true;
  const double budget_ns = options_.budget_s * 1e9;
  constexpr double kMostTooMuchNs = 10e9;
  return left_ns_ > -std::min(budget_ns / 2, kMostTooMuchNs) &&
         calls * expected_ns(curve, kFactor) <= kShareOfBudget * budget_ns;
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

LentBuffers::~LentBuffers() {
  if (is_lost_) keep_for_ever(std::move(buffers_));
}

// Of starting `works` in `buffers`, and more, `started` came; the first error of these and of waiting for all.
Status Calibrator::wait_for_all(Communicator* group, std::span<const WorkId> works, Status started,
                                LentBuffers* buffers) const {
  for (const WorkId work : works) {
    const Status ended = group->wait(work, timeout_);
    if (started.ok()) started = ended;
  }
  if (!started.ok()) buffers->lose();
  return started;
}

Status Calibrator::run_collective(Communicator* group, const CollectiveCall& call, LentBuffers* buffers) const {
  const Result<WorkId> work = group->start(call);
  std::vector<WorkId> works;
  if (work.ok()) works.push_back(work.value());
  return wait_for_all(group, works, work.status(), buffers);
}

// Those that `curves` lacks. `groups` ranks of an inner unit run each collective together, over the unit's one link.
Status Calibrator::measure_collectives(Communicator* group, const std::string& level, std::int64_t groups,
                                       CollectiveCurves* curves, UnknownFields* unknown) {
  const auto blocks = static_cast<std::size_t>(group->world_size());
  const auto values_of = [&](std::int64_t bytes) {
    return static_cast<std::size_t>(bytes) / sizeof(float) + 1 + blocks;
  };
  const std::size_t values =
      std::max(values_of(options_.max_bytes), kAtOnce * values_of(std::min(options_.max_bytes, kMostBytesAtOnce)));
  LentBuffers buffers;
  float* const sent = buffers.add(values);
  float* const received = buffers.add(values);
  for (const OpKind kind : options_.collectives) {
    if (curves->contains(kind)) continue;
    Curve curve;
    const auto add_point = [&](std::int64_t bytes, int calls, std::int64_t most_runs) -> Status {
      const auto call_at = [&](std::size_t at) {
        return make_call(kind, bytes, group->world_size(), sent + at, received + at);
      };
      const int at_once = std::min(calls, kAtOnce);
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
        return wait_for_all(group, works, status, &buffers);
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
  const auto no_more_ns = static_cast<std::int64_t>(std::clamp(in_proportion, most / 2, most));
  // What is not measured lowers nothing that was.
  curve->add(known.sizes.back(), {.median_ns = std::max(no_more_ns, curve->times.times_ns.back())});
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
  LentBuffers buffers;
  CollectiveCall calls[2];
  for (CollectiveCall& call : calls) {
    float* const sent = buffers.add(values);
    call = make_call(kind, bytes, group->world_size(), sent, buffers.add(values)).call;
  }
  const std::string what = "two of " + std::string(op_kind_name(kind)) + "@" + level->name;
  CORTADO_ASSIGN_OR_RETURN(const Point in_turn, measure(what + " in turn", [&]() -> Status {
                             CORTADO_RETURN_IF_ERROR(run_collective(group, calls[0], &buffers));
                             return run_collective(group, calls[1], &buffers);
                           }));
  CORTADO_ASSIGN_OR_RETURN(const Point at_once, measure(what + " at once", [&]() -> Status {
                             std::vector<WorkId> works;
                             Status status;
                             for (std::size_t i = 0; i < std::size(calls) && status.ok(); ++i) {
                               const Result<WorkId> work = group->start(calls[i]);
                               status = work.status();
                               if (work.ok()) works.push_back(work.value());
                             }
                             return wait_for_all(group, works, status, &buffers);
                           }));
  const double share = static_cast<double>(std::max<std::int64_t>(1, at_once.median_ns)) /
                       static_cast<double>(std::max<std::int64_t>(1, in_turn.median_ns));
  level->overlap_time_share = std::clamp(std::round(1000 * share) / 1000, 0.001, 100.0);
  return {};
}

// All-reduces of as many bytes in three types, of the largest size that was measured and fits into what is left: where
// processors add slower than links send, sums of 16 bits take longer. Of sizes that are mostly latency they tell
// nothing.
Status Calibrator::measure_sums(Communicator* group, std::int64_t groups, ClusterLevel* level) {
  const auto all_reduce = level->collectives.find(OpKind::kAllReduce);
  if (!has_sums_to_measure(*level) || group->world_size() == 1 || all_reduce == level->collectives.end()) return {};
  const TimeCurve& curve = all_reduce->second;
  std::size_t size = curve.sizes.size() - 1;
  const double most_ns = kShareOfLeft * left_ns_ / (3 * (1 + kFewestRuns));
  while (size > 0 && static_cast<double>(curve.times_ns[size]) > most_ns) --size;
  if (curve.times_ns[size] < kOfSize * curve.times_ns[0]) return {};
  const std::int64_t bytes = curve.sizes[size] / groups;
  LentBuffers buffers;
  float* const values = buffers.add(static_cast<std::size_t>(bytes) / sizeof(float) + 1);
  const auto beyond_latency_ns = [&](DType dtype) -> Result<double> {
    const CollectiveCall call = make_call(OpKind::kAllReduce, bytes, group->world_size(), values, values, dtype).call;
    const std::string what = "all_reduce@" + level->name + " of " + std::string(dtype_name(dtype));
    CORTADO_ASSIGN_OR_RETURN(const Point point, measure(what, [&] { return run_collective(group, call, &buffers); }));
    return static_cast<double>(std::max<std::int64_t>(1, point.median_ns - curve.times_ns[0]));
  };
  CORTADO_ASSIGN_OR_RETURN(const double float32_ns, beyond_latency_ns(DType::kFloat32));
  const auto factor = [&](DType dtype) -> Result<double> {
    CORTADO_ASSIGN_OR_RETURN(const double ns, beyond_latency_ns(dtype));
    return std::clamp(std::round(1000 * ns / float32_ns) / 1000, 1.0, kMostSumFactor);
  };
  if (!level->float16_sum_factor.has_value()) {
    CORTADO_ASSIGN_OR_RETURN(level->float16_sum_factor, factor(DType::kFloat16));
  }
  if (!level->bfloat16_sum_factor.has_value()) {
    CORTADO_ASSIGN_OR_RETURN(level->bfloat16_sum_factor, factor(DType::kBFloat16));
  }
  return {};
}

// What computation loses to a transfer that runs beside it: time that is added to enough products to outlast the
// transfer, beyond what its start keeps them, as a share of what the transfer takes alone. Not of transfers that are
// mostly latency: what they seem to take is how late ranks leave a barrier.
Status Calibrator::measure_transfers(const CollectiveCurves& curves, Cluster* cluster) {
  if (!options_.contention) return {};
  const auto all_reduce = curves.find(OpKind::kAllReduce);
  if (cluster->transfers_slow_backward.has_value() || communicator_->world_size() == 1) return {};
  if (all_reduce == curves.end()) return {};
  const TimeCurve& curve = all_reduce->second;
  const double most_ns = std::max(left_ns_ / kTimesBeside, kShareBeside * options_.budget_s * 1e9);
  // The larger, the less it matters that steps of the machine vary.
  std::int64_t bytes = curve.sizes.back();
  while (bytes > curve.sizes[0] && static_cast<double>(curve.at(bytes)) > most_ns) bytes /= 2;
  if (curve.at(bytes) < kOfSize * curve.times_ns[0] || curve.at(bytes) == 0) return {};
  LentBuffers buffers;
  float* const values = buffers.add(static_cast<std::size_t>(bytes) / sizeof(float) + 1);
  const CollectiveCall call = make_call(OpKind::kAllReduce, bytes, communicator_->world_size(), values, values).call;
  // The curve's may be of several at once.
  CORTADO_ASSIGN_OR_RETURN(const Point transfer,
                           measure("all_reduce of " + std::to_string(bytes) + " bytes alone",
                                   [&] { return run_collective(communicator_, call, &buffers); }));
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
                             const Result<WorkId> work = communicator_->start(call);
                             std::vector<WorkId> works;
                             if (work.ok()) works.push_back(work.value());
                             const Status computed = work.ok() ? compute() : work.status();
                             return wait_for_all(communicator_, works, computed, &buffers);
                           }));
  const std::int64_t added_ns = beside.median_ns - alone.median_ns - cluster->collective_start_ns.value_or(0);
  const double share = static_cast<double>(added_ns) / static_cast<double>(transfer_ns);
  cluster->transfers_slow_backward = std::round(1000 * std::clamp(share, 0.0, 1.0)) / 1000;
  return {};
}

// What starting a collective keeps a thread for that computes before and after: where the transport has threads of its
// own and cores are few, these may take the core at once. Small all-reduces, as compressed gradients make them. A start
// takes little or a scheduler's slice, so it is the mean over some of them, on all ranks, whose median over runs
// counts.
Status Calibrator::measure_starts(const CollectiveCurves& curves, Cluster* cluster) {
  const auto all_reduce = curves.find(OpKind::kAllReduce);
  if (!measures_starts(*cluster) || all_reduce == curves.end()) return {};
  constexpr std::int64_t kBytes = 256 << 10, kStarts = 4, kBetweenNs = 3'000'000;
  const double most_ns = kShareBeside * options_.budget_s * 1e9 / kStarts;
  std::int64_t bytes = std::min(options_.max_bytes, kBytes);
  while (bytes > kSmallestBytes && static_cast<double>(all_reduce->second.at(bytes)) > most_ns) bytes /= 2;
  LentBuffers buffers;
  std::vector<CollectiveCall> calls;
  for (std::int64_t i = 0; i < kStarts; ++i) {
    float* const data = buffers.add(static_cast<std::size_t>(bytes) / sizeof(float) + 1);
    calls.push_back(make_call(OpKind::kAllReduce, bytes, communicator_->world_size(), data, data).call);
  }
  MatrixProduct product;
  const auto compute = [&]() -> Status {
    const std::int64_t until_ns = clock_->now_ns() + kBetweenNs;
    for (std::int64_t i = 0; i < kMostProducts && clock_->now_ns() < until_ns; ++i) {
      CORTADO_RETURN_IF_ERROR(product.run());
    }
    return {};
  };
  std::vector<std::int64_t> kept_ns;  // by run
  const auto act = [&]() -> Status {
    kept_ns.push_back(0);
    std::vector<WorkId> works;
    Status status = compute();
    while (status.ok() && works.size() < calls.size()) {
      const std::int64_t start_ns = clock_->now_ns();
      const Result<WorkId> work = communicator_->start(calls[works.size()]);
      kept_ns.back() += clock_->now_ns() - start_ns;
      if (work.ok()) works.push_back(work.value());
      status = work.ok() ? compute() : work.status();
    }
    return wait_for_all(communicator_, works, status, &buffers);
  };
  CORTADO_RETURN_IF_ERROR(measure("starts of all_reduce beside computation", act).status());
  kept_ns.erase(kept_ns.begin());  // when connections came up
  CORTADO_ASSIGN_OR_RETURN(std::vector<std::int64_t> of_ranks, mean_of_ranks(communicator_, kept_ns, timeout_));
  std::sort(of_ranks.begin(), of_ranks.end());
  cluster->collective_start_ns = of_ranks[(of_ranks.size() - 1) / 2] / kStarts;
  return {};
}

}  // namespace cortado
