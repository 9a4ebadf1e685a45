// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "cortado/trace.h"

namespace cortado {

std::string_view stage_name(Stage stage) {
  constexpr std::string_view kNames[kStageCount] = {"encode", "communicate", "wait", "decode", "orthogonalise"};
  return kNames[static_cast<int>(stage)];
}

Status write_chrome_trace(const std::string& path, const std::vector<TraceEvent>& events, int process_id,
                          const std::vector<std::string>& tensor_names) {
  nlohmann::json list = nlohmann::json::array();
  for (int stage = 0; stage < kStageCount; ++stage) {
    list.push_back({{"name", "thread_name"},
                    {"ph", "M"},
                    {"pid", process_id},
                    {"tid", stage},
                    {"args", {{"name", stage_name(static_cast<Stage>(stage))}}}});
  }
  for (const TraceEvent& event : events) {
    const bool has_tensor = event.tensor >= 0 && event.tensor < static_cast<std::int32_t>(tensor_names.size());
    std::string name(stage_name(event.stage));
    if (has_tensor) {
      name += " " + tensor_names[event.tensor];
    } else if (event.message >= 0) {
      name += " message " + std::to_string(event.message);
    }
    list.push_back({{"name", name},
                    {"ph", "X"},
                    {"pid", process_id},
                    {"tid", static_cast<int>(event.stage)},
                    {"ts", static_cast<double>(event.start_ns) / 1e3},  // the format counts in microseconds
                    {"dur", static_cast<double>(event.end_ns - event.start_ns) / 1e3},
                    {"args", {{"step", event.step}, {"bytes", event.bytes}}}});
  }
  std::ofstream file(path);
  file << nlohmann::json{{"traceEvents", std::move(list)}, {"displayTimeUnit", "ms"}};
  file.close();
  if (!file) {
    return make_error(StatusCode::kIoError, "can't write the trace to \"%s\": %s", path.c_str(), std::strerror(errno));
  }
  return {};
}

}  // namespace cortado
