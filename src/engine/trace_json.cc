// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Traces as JSON: the format cortado.trace/1 and the one of Chrome.
#include <algorithm>
#include <array>
#include <exception>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <vector>

#include "core/check.h"
#include "core/fault_json.h"
#include "core/json_text.h"
#include "cortado/trace.h"

namespace cortado {

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kTraceFormat = "cortado.trace/1";
constexpr std::size_t kEventFields = 7;

Status unlike(const std::string& place, const char* expected, const Json& found) {
  return make_error(StatusCode::kCorruptData, "%s: expected %s, got %s", place.c_str(), expected,
                    shortened_json(found).c_str());
}

// The member `key` of `object` as an integer from `lowest` to `highest`.
Result<std::int64_t> integer(const Json& object, const char* key, std::int64_t lowest, std::int64_t highest) {
  const Json value = object.value(key, Json());
  const bool fits = value.is_number_integer() &&
                    (!value.is_number_unsigned() || value.get<std::uint64_t>() <= static_cast<std::uint64_t>(highest));
  if (!fits || value.get<std::int64_t>() < lowest || value.get<std::int64_t>() > highest) {
    const std::string range = "an integer from " + std::to_string(lowest) + " to " + std::to_string(highest);
    return unlike(key, range.c_str(), value);
  }
  return value.get<std::int64_t>();
}

Result<std::vector<std::string>> texts(const Json& object, const char* key) {
  const Json& list = object.contains(key) ? object[key] : Json();
  if (!list.is_array()) return unlike(key, "a list of texts", list);
  std::vector<std::string> result;
  for (const Json& item : list) {
    if (!item.is_string()) return unlike(key, "a list of texts", list);
    result.push_back(item.get<std::string>());
  }
  return result;
}

Result<std::vector<Stage>> stages(const Json& object) {
  CORTADO_ASSIGN_OR_RETURN(const std::vector<std::string> names, texts(object, "stages"));
  std::vector<Stage> result;
  for (const std::string& name : names) {
    int stage = 0;
    while (stage < kStageCount && stage_name(static_cast<Stage>(stage)) != name) ++stage;
    if (stage == kStageCount) return unlike("stages", "names of stages", name);
    result.push_back(static_cast<Stage>(stage));
  }
  return result;
}

Result<TraceEvent> event_of(const Json& fields, const std::vector<Stage>& stages, std::size_t tensors,
                            const std::string& place) {
  constexpr const char* kExpected =
      "[stage, step, message, tensor, start_ns, end_ns, bytes], integers within the lists of this file";
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max() / 4;  // differences stay in range
  if (!fields.is_array() || fields.size() != kEventFields) return unlike(place, kExpected, fields);
  std::int64_t values[kEventFields];
  for (std::size_t i = 0; i < kEventFields; ++i) {
    const bool is_small = fields[i].is_number_integer() &&
                          (!fields[i].is_number_unsigned() || fields[i].get<std::uint64_t>() <= std::uint64_t{kMost});
    if (!is_small || fields[i].get<std::int64_t>() < -1) return unlike(place, kExpected, fields);
    values[i] = fields[i].get<std::int64_t>();
  }
  const auto [stage, step, message, tensor, start_ns, end_ns, bytes] = values;
  const bool is_possible = stage >= 0 && stage < static_cast<std::int64_t>(stages.size()) && step >= 0 &&
                           message <= std::numeric_limits<std::int32_t>::max() &&
                           tensor < static_cast<std::int64_t>(tensors) && start_ns >= 0 && end_ns >= start_ns &&
                           bytes >= 0;
  if (!is_possible) return unlike(place, kExpected, fields);
  return TraceEvent{.stage = stages[static_cast<std::size_t>(stage)],
                    .message = static_cast<std::int32_t>(message),
                    .tensor = static_cast<std::int32_t>(tensor),
                    .step = step,
                    .start_ns = start_ns,
                    .end_ns = end_ns,
                    .bytes = bytes};
}

// What files of engines without a plan, and older ones, lack.
Status name_collectives(const Json& file, Trace* trace) {
  CORTADO_ASSIGN_OR_RETURN(trace->collectives, texts(file, "collectives"));
  constexpr const char* kExpected = "a place in collectives, or -1, for each communicate event";
  const Json places = file.value("collective_of", Json());
  std::size_t next = 0;
  for (TraceEvent& event : trace->events) {
    if (event.stage != Stage::kCommunicate) continue;
    if (!places.is_array() || next == places.size()) return unlike("collective_of", kExpected, places);
    const Json& place = places[next++];
    const bool is_known = place.is_number_unsigned() && place.get<std::uint64_t>() < trace->collectives.size();
    if (!is_known && place != -1) return unlike("collective_of", kExpected, place);
    event.collective = static_cast<std::int32_t>(place.get<std::int64_t>());
  }
  if (!places.is_array() || next != places.size()) return unlike("collective_of", kExpected, places);
  return {};
}

Result<Trace> trace_of(const Json& file) {
  if (!file.is_object() || file.value("format", Json()) != kTraceFormat) {
    return unlike("the file", "an object of \"format\": \"cortado.trace/1\"",
                  file.is_object() ? file.value("format", Json()) : file);
  }
  Trace trace;
  const Json spec = file.value("spec", Json());
  if (!spec.is_string()) return unlike("spec", "a text", spec);
  trace.spec = spec.get<std::string>();
  constexpr std::int64_t kMostRanks = 1 << 24;
  CORTADO_ASSIGN_OR_RETURN(const std::int64_t world_size, integer(file, "world_size", 1, kMostRanks));
  CORTADO_ASSIGN_OR_RETURN(const std::int64_t rank, integer(file, "rank", 0, world_size - 1));
  CORTADO_ASSIGN_OR_RETURN(trace.dropped, integer(file, "dropped", 0, std::int64_t{1} << 60));
  trace.world_size = static_cast<int>(world_size);
  trace.rank = static_cast<int>(rank);
  CORTADO_ASSIGN_OR_RETURN(trace.tensors, texts(file, "tensors"));
  CORTADO_ASSIGN_OR_RETURN(const std::vector<Stage> known, stages(file));
  const Json& events = file.contains("events") ? file["events"] : Json();
  if (!events.is_array()) return unlike("events", "a list", events);
  for (std::size_t i = 0; i < events.size(); ++i) {
    const std::string place = "events[" + std::to_string(i) + "]";
    CORTADO_ASSIGN_OR_RETURN(const TraceEvent event, event_of(events[i], known, trace.tensors.size(), place));
    trace.events.push_back(event);
  }
  if (file.contains("collectives")) CORTADO_RETURN_IF_ERROR(name_collectives(file, &trace));
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
  if (const auto fault = find_json_fault(text)) {
    return make_error(StatusCode::kCorruptData, "a trace is JSON: %s: expected %s, got %s", fault->place.c_str(),
                      fault->expected.c_str(), fault->found.c_str());
  }
  try {
    return trace_of(Json::parse(text));
  } catch (const std::exception& error) {  // of the parser
    return make_error(StatusCode::kCorruptData, "a trace is JSON, and this is not: %s", error.what());
  }
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
