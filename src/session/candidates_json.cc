// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Candidates on their way from rank 0 to the others, which run the same program: no file format.
#include <nlohmann/json.hpp>

#include "core/json_text.h"
#include "session/candidates.h"

namespace cortado {

namespace {

using Json = nlohmann::ordered_json;

}  // namespace

std::string candidates_to_json(const Candidates& candidates) {
  Json list = Json::array();
  for (const AutoCandidate& candidate : candidates.list) {
    list.push_back(Json::array({candidate.what, candidate.predicted_ns}));
  }
  return json_line(Json{{"list", list}, {"notes", candidates.notes}});
}

Result<Candidates> candidates_from_json(const std::string& json) {
  const Json document = Json::parse(json, nullptr, /*allow_exceptions=*/false);
  const Status damaged(StatusCode::kInternal, "what rank 0 sent of its candidates can't be read");
  if (!document.is_object() || !document.contains("list") || !document.contains("notes")) return damaged;
  Candidates candidates;
  for (const Json& entry : document["list"]) {
    const bool is_entry = entry.is_array() && entry.size() == 2 && entry[0].is_string() && entry[1].is_number_integer();
    if (!is_entry) return damaged;
    Result<AutoCandidate> candidate = candidate_of(entry[0].get<std::string>());
    if (!candidate.ok()) return damaged;
    candidate.value().predicted_ns = entry[1].get<std::int64_t>();
    candidates.list.push_back(std::move(candidate).value());
  }
  for (const Json& note : document["notes"]) {
    if (!note.is_string()) return damaged;
    candidates.notes.push_back(note.get<std::string>());
  }
  if (candidates.list.empty()) return damaged;
  return candidates;
}

}  // namespace cortado
