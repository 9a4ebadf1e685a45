// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "core/check.h"
#include "core/format.h"
#include "core/json_text.h"
#include "cortado/planner.h"
#include "planner/report_page.h"

namespace cortado {

namespace {

using Json = nlohmann::ordered_json;

std::string milliseconds(std::int64_t ns) {
  char text[40];
  std::snprintf(text, sizeof(text), "%.2f ms", static_cast<double>(ns) * 1e-6);
  return text;
}

std::string ratio(std::int64_t a, std::int64_t b) {
  char text[40];
  std::snprintf(text, sizeof(text), "%.2fx",
                static_cast<double>(a) / static_cast<double>(std::max<std::int64_t>(b, 1)));
  return text;
}

std::string way_text(const std::string& codec, const Option& option, const Topology& topology) {
  return (option.encodes() > 0 ? codec + " " : "") + option.to_string(topology);
}

const char* kind_of(std::size_t row, std::size_t rows, std::size_t levels) {
  if (row == 0) return "compute";
  if (row >= rows - levels) return "link";
  return row >= rows - levels - 2 ? "copy" : "codec";
}

Json timeline_json(const std::string& title, const Timeline& timeline, const Plan& plan) {
  Json object = {{"title", title}, {"step_ns", timeline.step_ns}, {"rows", timeline.rows}};
  for (std::size_t r = 0; r < timeline.rows.size(); ++r) {
    object["kinds"].push_back(kind_of(r, timeline.rows.size(), plan.topology.levels.size()));
  }
  object["events"] = Json::array();
  for (const TimelineEvent& event : timeline.events) {
    object["events"].push_back(Json::array({event.row, event.start_ns, event.end_ns, event.bucket, event.name}));
  }
  object["labels"] = Json::array();
  for (const PlanBucket& bucket : plan.buckets) {
    std::string label = std::to_string(bucket.tensors.size()) + " tensors: " + bucket.tensors.front();
    if (bucket.tensors.size() > 1) label += " .. " + bucket.tensors.back();
    object["labels"].push_back(label + "\n" + way_text(bucket.codec, bucket.option, plan.topology));
  }
  return object;
}

// The middle one of the measured steps by length, its stages as rows.
Json measured_json(const Trace& trace) {
  struct Span {
    std::int64_t start_ns = INT64_MAX, end_ns = 0;
  };
  std::map<std::int64_t, Span> steps;
  for (const TraceEvent& event : trace.events) {
    Span& span = steps[event.step];
    span.start_ns = std::min(span.start_ns, event.start_ns);
    span.end_ns = std::max(span.end_ns, event.end_ns);
  }
  std::vector<std::pair<std::int64_t, std::int64_t>> lengths;
  for (const auto& [step, span] : steps) lengths.push_back({span.end_ns - span.start_ns, step});
  std::sort(lengths.begin(), lengths.end());
  const std::int64_t shown = lengths[lengths.size() / 2].second;
  Json object = {{"title", "Measured exchange (" + trace.spec + ", step " + std::to_string(shown) +
                               "), from the first encode on; a trace has no computation"},
                 {"step_ns", steps[shown].end_ns - steps[shown].start_ns}};
  for (int stage = 0; stage < kStageCount; ++stage) {
    object["rows"].push_back(stage_name(static_cast<Stage>(stage)));
    object["kinds"].push_back(
        static_cast<Stage>(stage) == Stage::kCommunicate || static_cast<Stage>(stage) == Stage::kWait ? "link"
                                                                                                      : "codec");
  }
  object["events"] = Json::array();
  for (const TraceEvent& event : trace.events) {
    if (event.step != shown) continue;
    std::string name(stage_name(event.stage));
    if (event.tensor >= 0) name += " " + trace.tensors[static_cast<std::size_t>(event.tensor)];
    object["events"].push_back({static_cast<int>(event.stage), event.start_ns - steps[shown].start_ns,
                                event.end_ns - steps[shown].start_ns, event.message, name});
  }
  object["labels"] = Json::array();
  return object;
}

Json tensors_json(const Plan& plan, const Job& job, const Explanation& explanation) {
  std::map<std::string, const JobTensor*> by_name;
  for (const JobTensor& tensor : job.tensors) by_name[tensor.name] = &tensor;
  Json list = Json::array();
  for (std::size_t b = 0; b < plan.buckets.size(); ++b) {
    const PlanBucket& bucket = plan.buckets[b];
    const ExplainedBucket& explained = explanation.buckets[b];
    const bool has_other = !explained.others.empty() && explained.others.front().is_allowed;
    for (const std::string& name : bucket.tensors) {
      const JobTensor& tensor = *by_name.at(name);
      Json row = {{"name", name}, {"elems", tensor.elems()}, {"ready_ns", tensor.ready_ns}, {"bucket", b}};
      row["codec"] = bucket.option.encodes() > 0 ? bucket.codec : "none";
      row["option"] = bucket.option.to_string(plan.topology);
      row["gain_ns"] = explained.gain_ns;
      row["error"] = explained.error.has_value() ? Json(*explained.error) : Json(nullptr);
      row["runner_up"] =
          has_other ? way_text(explained.others.front().codec, explained.others.front().option, plan.topology) : "";
      row["runner_up_ns"] = has_other ? Json(explained.others.front().step_ns - explanation.step_ns) : Json(nullptr);
      list.push_back(std::move(row));
    }
  }
  return list;
}

// By bucket, how else it could go and why it does not: [way, reason], best first.
Json ways_json(const Plan& plan, const Explanation& explanation) {
  Json list = Json::array();
  for (const ExplainedBucket& explained : explanation.buckets) {
    list.push_back(Json::array());
    for (const ExplainedWay& other : explained.others) {
      const std::string way = other.step_ns >= 0 ? way_text(other.codec, other.option, plan.topology) : other.codec;
      list.back().push_back(Json::array({way, other.reason}));
    }
  }
  return list;
}

// For text between tags and in attributes.
std::string html_escaped(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    escaped += c == '&' ? "&amp;" : c == '<' ? "&lt;" : c == '>' ? "&gt;" : c == '"' ? "&quot;" : std::string(1, c);
  }
  return escaped;
}

void replace_all(std::string* text, const std::string& from, const std::string& to) {
  for (std::size_t at = text->find(from); at != std::string::npos; at = text->find(from, at + to.size())) {
    text->replace(at, from.size(), to);
  }
}

}  // namespace

Result<std::string> report_to_html(const Plan& plan, const Job& job, const Cluster& cluster,
                                   const Explanation& explanation, const Trace* measured, std::int64_t search_steps) {
  CORTADO_ASSIGN_OR_RETURN(const Timeline timeline, simulate_plan(plan, job, cluster));
  CORTADO_ASSIGN_OR_RETURN(Plan dense, make_plan(job, cluster, {.search_steps = search_steps}, "dense"));
  std::set<std::string> codecs;
  for (const PlanBucket& bucket : plan.buckets) {
    if (bucket.option.encodes() > 0) codecs.insert(bucket.codec);
  }
  if (codecs.empty() && timeline.step_ns < dense.predicted_step_ns) dense = plan;  // searched for longer
  CORTADO_ASSIGN_OR_RETURN(const Timeline dense_timeline, simulate_plan(dense, job, cluster));
  Json data;
  data["about"] = std::to_string(job.tensors.size()) + " tensors in " + std::to_string(plan.buckets.size()) +
                  " buckets, " + std::to_string(plan.topology.world_size()) +
                  " ranks; codecs: " + (codecs.empty() ? "none" : "");
  for (const std::string& codec : codecs)
    data["about"] = data["about"].get<std::string>() + (codec == *codecs.begin() ? "" : ", ") + codec;
  data["step_ns"] = timeline.step_ns;
  data["numbers"] = Json::array();
  const auto add_number = [&](const char* name, const std::string& value) {
    data["numbers"].push_back(Json::array({name, value}));
  };
  add_number("step", milliseconds(timeline.step_ns));
  add_number("dense", milliseconds(dense_timeline.step_ns));
  add_number("faster than dense", ratio(dense_timeline.step_ns, timeline.step_ns));
  add_number("lower bound", milliseconds(plan.lower_bound_ns));
  const std::optional<double> error = expected_error(plan, job);
  add_number("relative error", error.has_value() ? format_text("%.3g", *error) : "not measured");
  add_number("planned in", milliseconds(plan.planner_ns));
  data["notes"] = plan.notes;
  data["timelines"] = Json::array(
      {timeline_json("Baseline: dense", dense_timeline, dense), timeline_json("This plan", timeline, plan)});
  data["compared"] = Json::array();
  if (measured != nullptr && !measured->events.empty()) {
    data["timelines"].push_back(measured_json(*measured));
    for (const PredictedTime& time : compare_with_trace(timeline, *measured)) {
      data["compared"].push_back(Json::array({time.what, time.predicted_ns, time.measured_ns}));
    }
  }
  data["totals"] = Json::array();
  data["totals"].push_back(Json::array({"this plan", timeline.step_ns}));
  for (const auto& [name, step_ns] : explanation.totals) data["totals"].push_back(Json::array({name, step_ns}));
  data["tensors"] = tensors_json(plan, job, explanation);
  data["ways"] = ways_json(plan, explanation);

  std::string json = json_line(data);
  replace_all(&json, "<", "\\u003c");  // no name may end the script, or begin a comment that hides its end
  std::string page = kReportPage;
  replace_all(&page, "TITLE", html_escaped("Cortado plan: " + job.name + " on " + cluster.name));
  const std::size_t at = page.find(">DATA<");
  page.replace(at + 1, 4, json);
  return page;
}

}  // namespace cortado
