// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What the engine did and when: one event for every stage of every message.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cortado/status.h"

namespace cortado {

// Time is passed in, so that tests decide what it is. Must be monotonic; may be called from several threads.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual std::int64_t now_ns() const = 0;
};

// The machine's monotonic clock.
const Clock* steady_clock();

enum class Stage : std::uint8_t {
  kEncode,         // gradient and residual read, residual and factor written
  kCommunicate,    // from the start of a collective until it was seen to have ended
  kWait,           // the part of kCommunicate in which the caller's thread was blocked
  kDecode,         // mean gradient written; before it, where its place is needed, what a rollback would leave
  kOrthogonalise,  // the received factor made the next step's basis
};
constexpr int kStageCount = 5;

std::string_view stage_name(Stage stage);  // "encode", "communicate" ...

struct TraceEvent {
  Stage stage = Stage::kEncode;
  std::int32_t message = -1;  // index within the step
  std::int32_t tensor = -1;   // index of the tensor, or -1 for the whole message
  std::int64_t step = 0;
  std::int64_t start_ns = 0;
  std::int64_t end_ns = 0;
  std::int64_t bytes = 0;        // payload bytes of the collective, or gradient bytes of the tensor or message
  std::int32_t collective = -1;  // of kCommunicate: index of its name, or -1: it has none

  bool operator==(const TraceEvent&) const = default;
};

// Keeps the first `capacity` events; allocates only in its constructor, drops and counts what comes after.
class TraceRecorder {
 public:
  explicit TraceRecorder(std::size_t capacity) { events_.reserve(capacity); }

  void record(const TraceEvent& event) {
    if (events_.size() < events_.capacity()) {
      events_.push_back(event);
    } else {
      ++dropped_;
    }
  }
  // The index of a collective's name. May allocate, so not for use within a step. clear() keeps the names.
  std::int32_t name_collective(const std::string& name) {
    const auto found = std::find(collectives_.begin(), collectives_.end(), name);
    const auto index = static_cast<std::int32_t>(found - collectives_.begin());
    if (found == collectives_.end()) collectives_.push_back(name);
    return index;
  }
  const std::vector<TraceEvent>& events() const { return events_; }
  const std::vector<std::string>& collectives() const { return collectives_; }
  std::int64_t dropped() const { return dropped_; }
  void clear() { events_.clear(), dropped_ = 0; }

 private:
  std::vector<TraceEvent> events_;
  std::vector<std::string> collectives_;
  std::int64_t dropped_ = 0;
};

// What one rank recorded, with everything needed to read it later and elsewhere.
struct Trace {
  std::string spec;  // of the engine
  int rank = 0;
  int world_size = 1;
  std::vector<std::string> tensors;  // names, by TraceEvent::tensor
  std::vector<TraceEvent> events = {};
  std::int64_t dropped = 0;                   // events that found no room
  std::vector<std::string> collectives = {};  // "all_gather@intra", by TraceEvent::collective

  bool operator==(const Trace&) const = default;
};

// ---- one stream of events, its views --------------------------------------------------------------------------------

// The file format cortado.trace/1 (docs/trace_format.md), and back. A text of another format, a damaged or an
// impossible one is kCorruptData, one of another version kUnsupported; the message says where and what was expected.
std::string trace_to_json(const Trace& trace);
Result<Trace> parse_trace(std::string_view json);

// For chrome://tracing or Perfetto: one row a stage, more where its events overlap, one process a rank.
std::string trace_to_chrome(const Trace& trace);

// For a terminal, 100 columns wide: for each step one row a message, drawn over time.
std::string trace_to_text(const Trace& trace);

// Tables: where the time went, one row a stage, or one row a tensor (the slowest first).
std::string summarize_by_stage(const Trace& trace);
std::string summarize_by_tensor(const Trace& trace);

}  // namespace cortado
