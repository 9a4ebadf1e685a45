// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// simulate_plan(): a plan on the simulator, and the text view of what comes of it.
#include "planner/simulate/timeline.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <map>
#include <numeric>

#include "core/check.h"
#include "cortado/planner.h"
#include "cortado/printable.h"
#include "planner/simulate/simulator.h"

namespace cortado {

namespace {

// A bucket of the plan with its tensors in the job.
struct Located {
  int bucket = 0;
  std::vector<int> tensors;
  std::int64_t ready_ns = 0, elems = 0;
};

std::string bucket_place(std::size_t bucket) { return "plan: $.buckets[" + std::to_string(bucket) + "]"; }

// By readiness, as the simulator wants them.
Result<std::vector<Located>> locate(const Plan& plan, const Job& job) {
  std::map<std::string, int> numbers;
  for (std::size_t t = 0; t < job.tensors.size(); ++t) numbers[job.tensors[t].name] = static_cast<int>(t);
  std::vector<bool> seen(job.tensors.size(), false);
  std::vector<Located> located;
  for (std::size_t b = 0; b < plan.buckets.size(); ++b) {
    Located& bucket = located.emplace_back();
    bucket.bucket = static_cast<int>(b);
    for (std::size_t i = 0; i < plan.buckets[b].tensors.size(); ++i) {
      const std::string& name = plan.buckets[b].tensors[i];
      const std::string place = bucket_place(b) + ".tensors[" + std::to_string(i) + "]";
      const auto found = numbers.find(name);
      if (found == numbers.end()) {
        return make_error(StatusCode::kMismatch, "%s: expected a tensor of job \"%s\", got \"%s\"", place.c_str(),
                          job.name.c_str(), name.c_str());
      }
      if (seen[found->second]) {
        return make_error(StatusCode::kMismatch, "%s: expected each tensor once, got \"%s\" again", place.c_str(),
                          name.c_str());
      }
      const JobTensor& tensor = job.tensors[found->second];
      const std::vector<std::int64_t>& elems = plan.buckets[b].elems;
      if (i < elems.size() && elems[i] != tensor.elems()) {
        return make_error(StatusCode::kMismatch,
                          "%s.elems[%zu]: expected the %" PRId64 " elements of \"%s\" in job \"%s\", got %" PRId64,
                          bucket_place(b).c_str(), i, tensor.elems(), name.c_str(), job.name.c_str(), elems[i]);
      }
      seen[found->second] = true;
      bucket.tensors.push_back(found->second);
      bucket.ready_ns = std::max(bucket.ready_ns, tensor.ready_ns);
      bucket.elems += tensor.elems();
    }
  }
  for (std::size_t t = 0; t < seen.size(); ++t) {
    if (!seen[t]) {
      return make_error(StatusCode::kMismatch, "plan: $.buckets: expected all tensors of job \"%s\", \"%s\" is missing",
                        job.name.c_str(), job.tensors[t].name.c_str());
    }
  }
  std::stable_sort(located.begin(), located.end(),
                   [](const Located& a, const Located& b) { return a.ready_ns < b.ready_ns; });
  return located;
}

Status check_levels(const Plan& plan, const Cluster& cluster) {
  const auto refuse = [&](const std::string& field, const std::string& found, const std::string& expected) {
    return make_error(StatusCode::kMismatch, "plan: $.levels%s: expected %s, as cluster \"%s\" has, got %s",
                      field.c_str(), expected.c_str(), cluster.name.c_str(), found.c_str());
  };
  const std::vector<TopologyLevel>& found = plan.topology.levels;
  const std::vector<TopologyLevel> expected = cluster.topology().levels;
  if (found.size() != expected.size()) {
    return refuse("", std::to_string(found.size()), std::to_string(expected.size()) + " of them");
  }
  for (std::size_t l = 0; l < expected.size(); ++l) {
    const std::string level = "[" + std::to_string(l) + "]";
    if (found[l].name != expected[l].name) {
      return refuse(level + ".name", "\"" + found[l].name + "\"", "\"" + expected[l].name + "\"");
    }
    if (found[l].ranks != expected[l].ranks) {
      return refuse(level + ".ranks", std::to_string(found[l].ranks), std::to_string(expected[l].ranks));
    }
  }
  return {};
}

std::vector<std::string> row_names(const Cluster& cluster, int cpu_workers) {
  std::vector<std::string> rows = {"compute", "gpu codec"};
  for (int w = 0; w < cpu_workers; ++w) {
    rows.push_back(cpu_workers == 1 ? "cpu codec" : "cpu codec " + std::to_string(w));
  }
  rows.push_back("device to host");
  rows.push_back("host to device");
  for (const ClusterLevel& level : cluster.levels) rows.push_back(level.name);
  return rows;
}

int row_of(const SimulatedEvent& event, int workers) {
  if (event.bucket < 0) return 0;
  if (event.server <= kCpuCodec) return 1 + event.server + event.worker;
  return 1 + event.server + workers - 1;
}

std::string name_of(const SimulatedEvent& event, const OptionChain* chain, const Option* option) {
  if (event.bucket < 0) return event.step == 0 ? "backward" : event.step == 1 ? "optimizer" : "forward";
  const Step& step = chain->steps[event.step];
  if (step.part == StepPart::kPacking) return event.step == 0 ? "pack" : "unpack";
  if (step.part == StepPart::kStart) return "start";
  if (step.resource == kDeviceToHost || step.resource == kHostToDevice) return "copy";
  return std::string(op_kind_name(option->operations[step.operation].kind));
}

// What a plan's bucket does, step after step; refused if the plan could not have been made of these files. `shape` is
// that of the bucket's tensors.
Status lay_out_bucket(const CostModel& model, const std::vector<CodecCost>& codecs, const Job& job,
                      const Cluster& cluster, const PlanBucket& bucket, const Located& located,
                      const BucketShape& shape, OptionChain* chain) {
  const std::string place = bucket_place(located.bucket);
  const CodecCost* const codec = bucket.option.encodes() > 0 ? find_codec_cost(codecs, bucket.codec) : nullptr;
  if (codec == nullptr && bucket.option.encodes() > 0) {
    return make_error(StatusCode::kMismatch, "%s.codec: expected a codec that cluster \"%s\" has times of, got \"%s\"",
                      place.c_str(), cluster.name.c_str(), bucket.codec.c_str());
  }
  const auto all_tensors = [&](const auto& test) {
    return std::all_of(located.tensors.begin(), located.tensors.end(), [&](int t) { return test(job.tensors[t]); });
  };
  if (!all_tensors([&](const JobTensor& tensor) { return tensor.dtype == shape.dtype; })) {
    return make_error(StatusCode::kUnsupported, "%s: expected tensors of one dtype in job \"%s\", as plans for it have",
                      place.c_str(), job.name.c_str());
  }
  const int levels = static_cast<int>(cluster.levels.size());
  const Status checked =
      bucket.option.check(levels, codec != nullptr && (codec->sums || sums_factors(*codec, bucket.option, levels)));
  if (!checked.ok()) return checked.with_context(place);
  if (!make_chain(model, codec, shape, bucket.option, chain)) {
    const auto has_times = [&](const Operation& operation) {
      return operation.kind != OpKind::kEncode && operation.kind != OpKind::kDecode
                 ? true
                 : codec != nullptr && codec->runs_on(operation.device);
    };
    if (std::all_of(bucket.option.operations.begin(), bucket.option.operations.end(), has_times)) {
      return make_error(StatusCode::kUnsupported, "%s.option: \"%s\" is of low rank, and not coded in parts",
                        place.c_str(), bucket.codec.c_str());
    }
    return make_error(StatusCode::kMismatch, "%s.option: cluster \"%s\" has no times of \"%s\" on a device it uses",
                      place.c_str(), cluster.name.c_str(), bucket.codec.c_str());
  }
  const bool has_vectors = !all_tensors([](const JobTensor& tensor) { return tensor.shape.size() >= 2; });
  if (codec != nullptr && !can_go(*codec, bucket.option, levels, has_vectors)) {
    return make_error(StatusCode::kUnsupported,
                      "%s.option: \"%s\" is of low rank: it encodes once, what no other rank holds, too, and vectors "
                      "only in encode, all_reduce over all levels, decode",
                      place.c_str(), bucket.codec.c_str());
  }
  return {};
}

// Starts at the end of other steps, one behind the other, are shown by themselves: `at_end` tells how many an event
// has.
void split_off_starts(std::span<const int> at_end, std::int64_t start_ns, std::vector<TimelineEvent>* events) {
  for (std::size_t i = 0; i < at_end.size(); ++i) {
    if (at_end[i] == 0) continue;
    TimelineEvent start = (*events)[i];
    start.start_ns = std::max(start.start_ns, start.end_ns - at_end[i] * start_ns);
    start.name = "start";
    (*events)[i].end_ns = start.start_ns;
    events->push_back(std::move(start));
  }
}

Result<Timeline> simulate(const Plan& plan, const Job& job, const Cluster& cluster, bool gathers_sizes) {
  CORTADO_RETURN_IF_ERROR(job.check().with_context("job"));
  CORTADO_RETURN_IF_ERROR(check_for_planning(cluster));
  CORTADO_RETURN_IF_ERROR(check_levels(plan, cluster));
  CORTADO_ASSIGN_OR_RETURN(const std::vector<Located> located, locate(plan, job));
  std::vector<std::string> notes;
  CORTADO_ASSIGN_OR_RETURN(const std::vector<CodecCost> codecs, codec_costs(cluster, job.device, {}, &notes));
  CostModel model(cluster, job.device);
  model.gathers_sizes = gathers_sizes;

  // The sums want neighbours: the job's tensors in the order of the plan.
  std::vector<JobTensor> tensors;
  std::vector<int> first;
  for (const Located& bucket : located) {
    first.push_back(static_cast<int>(tensors.size()));
    for (const int t : bucket.tensors) tensors.push_back(job.tensors[t]);
  }
  TensorSums sums(codecs, tensors);
  std::vector<OptionChain> chains(located.size());
  std::vector<SimulatedBucket> buckets;
  for (std::size_t b = 0; b < located.size(); ++b) {
    const BucketShape shape = {located[b].elems, tensors[first[b]].dtype, &sums, first[b],
                               first[b] + static_cast<int>(located[b].tensors.size()) - 1};
    CORTADO_RETURN_IF_ERROR(
        lay_out_bucket(model, codecs, job, cluster, plan.buckets[located[b].bucket], located[b], shape, &chains[b]));
    buckets.push_back({located[b].ready_ns, chains[b].steps, located[b].elems});
  }

  const SimulatedJob simulated = simulated_job(job, cluster);
  Simulator simulator(simulated, static_cast<int>(cluster.levels.size()));
  std::vector<SimulatedEvent> events;
  Timeline timeline;
  timeline.step_ns = simulator.run(buckets, Simulator::kNever, &events);
  timeline.rows = row_names(cluster, simulated.cpu_workers);
  std::vector<int> starts_at_end;
  for (const SimulatedEvent& event : events) {
    TimelineEvent& shown = timeline.events.emplace_back();
    shown.start_ns = event.start_ns;
    shown.end_ns = event.end_ns;
    shown.row = row_of(event, simulated.cpu_workers);
    const bool is_compute = event.bucket < 0;
    shown.bucket = is_compute ? -1 : located[event.bucket].bucket;
    if (!is_compute) shown.operation = chains[event.bucket].steps[event.step].operation;
    shown.name = name_of(event, is_compute ? nullptr : &chains[event.bucket],
                         is_compute ? nullptr : &plan.buckets[located[event.bucket].bucket].option);
    starts_at_end.push_back(is_compute || shown.name == "start" ? 0 : chains[event.bucket].steps[event.step].starts);
  }
  split_off_starts(starts_at_end, model.start_ns(), &timeline.events);
  std::stable_sort(timeline.events.begin(), timeline.events.end(), [](const TimelineEvent& a, const TimelineEvent& b) {
    return std::pair(a.row, a.start_ns) < std::pair(b.row, b.start_ns);
  });
  return timeline;
}

}  // namespace

Result<Timeline> simulate_plan(const Plan& plan, const Job& job, const Cluster& cluster) {
  return simulate(plan, job, cluster, /*gathers_sizes=*/true);
}

Result<Timeline> simulate_messages(const Plan& buckets, const Job& job, const Cluster& cluster) {
  return simulate(buckets, job, cluster, /*gathers_sizes=*/false);
}

std::string timeline_to_text(const Timeline& timeline, const Plan& plan, int width) {
  const std::int64_t step_ns = std::max<std::int64_t>(timeline.step_ns, 1);
  const auto column = [&](std::int64_t ns) { return static_cast<int>(static_cast<__int128>(ns) * width / step_ns); };
  const auto letter = [](int bucket) {
    constexpr std::string_view kLetters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    return kLetters[static_cast<std::size_t>(bucket) % kLetters.size()];
  };
  std::vector<std::int64_t> busy_ns(timeline.rows.size(), 0);
  for (const TimelineEvent& event : timeline.events) busy_ns[event.row] += event.end_ns - event.start_ns;
  std::size_t name_width = 0;
  for (std::size_t r = 0; r < timeline.rows.size(); ++r) {
    if (busy_ns[r] > 0) name_width = std::max(name_width, timeline.rows[r].size());
  }
  char line[160];
  std::snprintf(line, sizeof(line), "step %.3f ms, one column %.3f ms\n", static_cast<double>(timeline.step_ns) * 1e-6,
                static_cast<double>(timeline.step_ns) * 1e-6 / width);
  std::string text = line;
  for (std::size_t r = 0; r < timeline.rows.size(); ++r) {
    if (busy_ns[r] == 0) continue;
    std::string cells(static_cast<std::size_t>(width), '.');
    for (const TimelineEvent& event : timeline.events) {
      if (event.row != static_cast<int>(r)) continue;
      const int begin = std::min(column(event.start_ns), width - 1);
      const int end = std::max(begin + 1, std::min(column(event.end_ns), width));
      const char mark = event.bucket >= 0          ? letter(event.bucket)
                        : event.name == "backward" ? '='
                        : event.name == "forward"  ? '>'
                                                   : '+';
      std::fill(cells.begin() + begin, cells.begin() + end, mark);
    }
    std::snprintf(line, sizeof(line), "%-*s %3.0f %% ", static_cast<int>(name_width), timeline.rows[r].c_str(),
                  100.0 * static_cast<double>(busy_ns[r]) / static_cast<double>(step_ns));
    text += printable(line) + cells + "\n";
  }
  for (std::size_t b = 0; b < plan.buckets.size(); ++b) {
    const PlanBucket& bucket = plan.buckets[b];
    std::snprintf(line, sizeof(line), "%c %zu tensor%s, ", letter(static_cast<int>(b)), bucket.tensors.size(),
                  bucket.tensors.size() == 1 ? "" : "s");
    text +=
        line +
        printable(bucket.tensors.front() + (bucket.tensors.size() > 1 ? " .. " + bucket.tensors.back() : "") + ": " +
                  (bucket.option.encodes() > 0 ? bucket.codec + " " : "") + bucket.option.to_string(plan.topology)) +
        "\n";
  }
  return text;
}

}  // namespace cortado
