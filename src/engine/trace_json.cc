// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Traces as JSON: the format cortado.trace/1 and the one of Chrome.
#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/fault_json.h"
#include "core/fields_json.h"
#include "core/json_text.h"
#include "cortado/trace.h"

namespace cortado {

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kTraceFormat = "cortado.trace/1";
constexpr std::size_t kEventFields = 7;

// None if it is not possible.
std::optional<TraceEvent> event_of(const Json& fields, const std::vector<Stage>& stages, std::size_t tensors) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max() / 4;  // differences stay in range
  if (!fields.is_array() || fields.size() != kEventFields) return std::nullopt;
  std::int64_t values[kEventFields];
  for (std::size_t i = 0; i < kEventFields; ++i) {
    const bool is_small = fields[i].is_number_integer() &&
                          (!fields[i].is_number_unsigned() || fields[i].get<std::uint64_t>() <= std::uint64_t{kMost});
    if (!is_small || fields[i].get<std::int64_t>() < -1) return std::nullopt;
    values[i] = fields[i].get<std::int64_t>();
  }
  const auto [stage, step, message, tensor, start_ns, end_ns, bytes] = values;
  const bool is_possible = stage >= 0 && stage < static_cast<std::int64_t>(stages.size()) && step >= 0 &&
                           message <= std::numeric_limits<std::int32_t>::max() &&
                           tensor < static_cast<std::int64_t>(tensors) && start_ns >= 0 && end_ns >= start_ns &&
                           bytes >= 0;
  if (!is_possible) return std::nullopt;
  return TraceEvent{.stage = stages[static_cast<std::size_t>(stage)],
                    .message = static_cast<std::int32_t>(message),
                    .tensor = static_cast<std::int32_t>(tensor),
                    .step = step,
                    .start_ns = start_ns,
                    .end_ns = end_ns,
                    .bytes = bytes};
}

// What files of engines without a plan, and older ones, lack.
void name_collectives(JsonFields& fields, Trace* trace) {
  constexpr const char* kExpected = "a place in collectives, or -1, for each communicate event";
  trace->collectives = fields.texts("collectives", true);
  const Json& places = fields.list("collective_of", kExpected, true);
  std::size_t next = 0;
  for (TraceEvent& event : trace->events) {
    if (event.stage != Stage::kCommunicate) continue;
    if (next == places.size()) return fields.fail("collective_of", kExpected, shortened_json(places));
    const Json& place = places[next];
    const bool is_known = place.is_number_unsigned() && place.get<std::uint64_t>() < trace->collectives.size();
    if (!is_known && place != -1) {
      return fields.fail_at(place_of(fields.place("collective_of"), next), "a place in collectives, or -1",
                            shortened_json(place));
    }
    ++next;
    event.collective = static_cast<std::int32_t>(place.get<std::int64_t>());
  }
  if (next != places.size()) fields.fail("collective_of", kExpected, shortened_json(places));
}

Trace read_trace(JsonFields& fields) {
  Trace trace;
  trace.spec = fields.text("spec");
  constexpr std::int64_t kMostRanks = 1 << 24;
  trace.world_size = static_cast<int>(fields.integer_within("world_size", 1, kMostRanks));
  trace.rank = static_cast<int>(fields.integer_within("rank", 0, trace.world_size - 1));
  trace.dropped = fields.integer_within("dropped", 0, std::int64_t{1} << 60);
  trace.tensors = fields.texts("tensors", true);
  const std::vector<Stage> known = fields.words("stages", Stage::kOrthogonalise, stage_name);
  const Json& events = fields.list("events", "a list of events", true);
  for (std::size_t i = 0; i < events.size() && fields.ok(); ++i) {
    const std::optional<TraceEvent> event = event_of(events[i], known, trace.tensors.size());
    if (!event.has_value()) {
      fields.fail_at(place_of(fields.place("events"), i),
                     "[stage, step, message, tensor, start_ns, end_ns, bytes], integers within the lists of this file",
                     shortened_json(events[i]));
    }
    trace.events.push_back(event.value_or(TraceEvent{}));
  }
  if (fields.has("collectives")) name_collectives(fields, &trace);
  return trace;
}

}  // namespace

std::string_view stage_name(Stage stage) {
  constexpr std::string_view kNames[kStageCount] = {"encode", "communicate", "wait", "decode", "orthogonalise"};
  return kNames[static_cast<int>(stage)];
}

namespace {

// Events of one row may not overlap in that format: each goes to the first lane of its stage that is free when it
// starts. `counts`: the lanes of each stage, one at least.
std::vector<int> lanes_of(const std::vector<TraceEvent>& events, std::array<int, kStageCount>* counts) {
  std::vector<std::size_t> order(events.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return events[a].start_ns < events[b].start_ns; });
  std::array<std::vector<std::int64_t>, kStageCount> free_ns;
  for (std::vector<std::int64_t>& of_stage : free_ns) of_stage.push_back(std::numeric_limits<std::int64_t>::min());
  std::vector<int> lanes(events.size());
  for (const std::size_t i : order) {
    std::vector<std::int64_t>& of_stage = free_ns[static_cast<std::size_t>(events[i].stage)];
    auto lane =
        std::find_if(of_stage.begin(), of_stage.end(), [&](std::int64_t ns) { return ns <= events[i].start_ns; });
    if (lane == of_stage.end()) lane = of_stage.insert(lane, 0);
    *lane = events[i].end_ns;
    lanes[i] = static_cast<int>(lane - of_stage.begin());
  }
  for (std::size_t stage = 0; stage < free_ns.size(); ++stage)
    (*counts)[stage] = static_cast<int>(free_ns[stage].size());
  return lanes;
}

}  // namespace

std::string trace_to_json(const Trace& trace) {
  Json stages = Json::array();
  for (int stage = 0; stage < kStageCount; ++stage) stages.push_back(stage_name(static_cast<Stage>(stage)));
  Json events = Json::array();
  for (const TraceEvent& event : trace.events) {
    events.push_back({static_cast<int>(event.stage), event.step, event.message, event.tensor, event.start_ns,
                      event.end_ns, event.bytes});
  }
  Json file = {{"format", kTraceFormat},         {"spec", trace.spec},         {"rank", trace.rank},
               {"world_size", trace.world_size}, {"dropped", trace.dropped},   {"tensors", trace.tensors},
               {"stages", std::move(stages)},    {"events", std::move(events)}};
  if (trace.collectives.empty()) return json_line(file);
  Json places = Json::array();
  for (const TraceEvent& event : trace.events) {
    if (event.stage == Stage::kCommunicate) places.push_back(event.collective);
  }
  file["collectives"] = trace.collectives;
  file["collective_of"] = std::move(places);
  return json_line(file);
}

Result<Trace> parse_trace(std::string_view text) {
  Trace trace;
  CORTADO_RETURN_IF_ERROR(read_json(text, kTraceFormat, StatusCode::kCorruptData, [&](JsonFields& top) {
    trace = read_trace(top);
    return Status();
  }));
  return trace;
}

std::string trace_to_chrome(const Trace& trace) {
  Json list = Json::array();
  const auto describe_row = [&](int stage, int lane, const char* what, const char* key, const Json& value) {
    list.push_back({{"name", what},
                    {"ph", "M"},
                    {"pid", trace.rank},
                    {"tid", stage + lane * kStageCount},
                    {"args", {{key, value}}}});
  };
  std::array<int, kStageCount> lanes;
  const std::vector<int> lane_of = lanes_of(trace.events, &lanes);
  for (int stage = 0; stage < kStageCount; ++stage) {
    const std::string name(stage_name(static_cast<Stage>(stage)));
    for (int lane = 0; lane < lanes[static_cast<std::size_t>(stage)]; ++lane) {
      describe_row(stage, lane, "thread_name", "name", lane == 0 ? name : name + " " + std::to_string(lane + 1));
      describe_row(stage, lane, "thread_sort_index", "sort_index", stage);
    }
  }
  for (std::size_t i = 0; i < trace.events.size(); ++i) {
    const TraceEvent& event = trace.events[i];
    std::string name(stage_name(event.stage));
    if (event.tensor >= 0 && event.tensor < static_cast<std::int32_t>(trace.tensors.size())) {
      name += " " + trace.tensors[static_cast<std::size_t>(event.tensor)];
    } else if (event.message >= 0) {
      name += " message " + std::to_string(event.message);
    }
    Json arguments = {{"step", event.step}, {"bytes", event.bytes}};
    if (event.collective >= 0 && event.collective < static_cast<std::int32_t>(trace.collectives.size())) {
      arguments["collective"] = trace.collectives[static_cast<std::size_t>(event.collective)];
    }
    list.push_back({{"name", name},
                    {"ph", "X"},
                    {"pid", trace.rank},
                    {"tid", static_cast<int>(event.stage) + lane_of[i] * kStageCount},
                    {"ts", static_cast<double>(event.start_ns) / 1e3},  // the format counts in microseconds
                    {"dur", static_cast<double>(event.end_ns - event.start_ns) / 1e3},
                    {"args", std::move(arguments)}});
  }
  return json_line(Json{{"traceEvents", std::move(list)}, {"displayTimeUnit", "ms"}});
}

}  // namespace cortado
