// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <nlohmann/json.hpp>

#include "core/json_text.h"
#include "cortado/planner.h"

namespace cortado {

std::string timeline_to_trace(const Timeline& timeline, const Plan& plan) {
  using Json = nlohmann::ordered_json;
  Json list = Json::array();
  for (std::size_t r = 0; r < timeline.rows.size(); ++r) {
    list.push_back(
        {{"name", "thread_name"}, {"ph", "M"}, {"pid", 0}, {"tid", r}, {"args", {{"name", timeline.rows[r]}}}});
    list.push_back({{"name", "thread_sort_index"}, {"ph", "M"}, {"pid", 0}, {"tid", r}, {"args", {{"sort_index", r}}}});
  }
  for (const TimelineEvent& event : timeline.events) {
    Json arguments = Json::object();
    std::string name = event.name;
    if (event.bucket >= 0) {
      const PlanBucket& bucket = plan.buckets[static_cast<std::size_t>(event.bucket)];
      name += " bucket " + std::to_string(event.bucket);
      arguments = {
          {"bucket", event.bucket}, {"tensors", bucket.tensors}, {"option", bucket.option.to_string(plan.topology)}};
      if (bucket.option.encodes() > 0) arguments["codec"] = bucket.codec;
    }
    list.push_back({{"name", name},
                    {"ph", "X"},
                    {"pid", 0},
                    {"tid", event.row},
                    {"ts", static_cast<double>(event.start_ns) / 1e3},  // the format counts in microseconds
                    {"dur", static_cast<double>(event.end_ns - event.start_ns) / 1e3},
                    {"args", std::move(arguments)}});
  }
  return json_line(Json{{"traceEvents", std::move(list)}, {"displayTimeUnit", "ms"}});
}

}  // namespace cortado
