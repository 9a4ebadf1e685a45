// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <map>

#include "core/checked_math.h"
#include "cortado/planner.h"

namespace cortado {

namespace {

// What a step took: of a timeline as simulated, of a trace as recorded.
struct StepTimes {
  std::int64_t start_ns = INT64_MAX, end_ns = INT64_MIN;
  std::int64_t encode_ns = 0, decode_ns = 0;

  void take(std::int64_t event_start_ns, std::int64_t event_end_ns, bool is_encode, bool is_decode) {
    start_ns = std::min(start_ns, event_start_ns);
    end_ns = std::max(end_ns, event_end_ns);
    if (is_encode) encode_ns = capped_add(encode_ns, event_end_ns - event_start_ns);
    if (is_decode) decode_ns = capped_add(decode_ns, event_end_ns - event_start_ns);
  }
  std::int64_t exchange_ns() const { return std::max(start_ns, end_ns) - start_ns; }
};

template <typename Get>
std::int64_t median(const std::map<std::int64_t, StepTimes>& steps, Get&& get) {
  std::vector<std::int64_t> values;
  for (const auto& [number, step] : steps) values.push_back(get(step));
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

std::vector<PredictedTime> compare_with_trace(const Timeline& timeline, const Trace& trace) {
  if (trace.events.empty()) return {};
  StepTimes predicted;
  for (const TimelineEvent& event : timeline.events) {
    if (event.bucket < 0) continue;
    // Traces record packing as encoding.
    const bool is_encode = event.name == "encode" || event.name == "pack";
    const bool is_decode = event.name == "decode" || event.name == "unpack";
    predicted.take(event.start_ns, event.end_ns, is_encode, is_decode);
  }
  std::map<std::int64_t, StepTimes> measured;
  for (const TraceEvent& event : trace.events) {
    measured[event.step].take(event.start_ns, event.end_ns, event.stage == Stage::kEncode,
                              event.stage == Stage::kDecode);
  }
  return {{"exchange", predicted.exchange_ns(), median(measured, [](const StepTimes& s) { return s.exchange_ns(); })},
          {"encode", predicted.encode_ns, median(measured, [](const StepTimes& s) { return s.encode_ns; })},
          {"decode", predicted.decode_ns, median(measured, [](const StepTimes& s) { return s.decode_ns; })}};
}

}  // namespace cortado
