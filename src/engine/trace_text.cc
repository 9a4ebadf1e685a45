// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Traces for a terminal: a drawing of each step, and tables of where the time went.
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <map>
#include <numeric>

#include "core/checked_math.h"
#include "cortado/printable.h"
#include "cortado/trace.h"

namespace cortado {

namespace {

constexpr int kDrawnColumns = 52;
constexpr std::int32_t kNoMessage = -1;  // encoding, which comes before a tensor's message is complete

constexpr char kMarks[kStageCount] = {'E', '=', 'w', 'D', 'O'};
constexpr const char* kLegend = "E encode, = under way, w of that waited for, D decode, O orthogonalise\n";

template <typename... Values>
void append(std::string& text, const char* format, Values... values) {
  char line[256];
  std::snprintf(line, sizeof(line), format, values...);
  text += line;
}

double ms(std::int64_t ns) { return static_cast<double>(ns) * 1e-6; }

std::int64_t duration_ns(const TraceEvent& event) { return event.end_ns - event.start_ns; }

std::string bytes_text(std::int64_t bytes) {
  char text[32];
  const auto value = static_cast<double>(bytes);
  if (bytes >= 1'000'000'000) {
    std::snprintf(text, sizeof(text), "%.2f GB", value * 1e-9);
  } else if (bytes >= 1'000'000) {
    std::snprintf(text, sizeof(text), "%.2f MB", value * 1e-6);
  } else if (bytes >= 1'000) {
    std::snprintf(text, sizeof(text), "%.1f kB", value * 1e-3);
  } else {
    std::snprintf(text, sizeof(text), "%" PRId64 " B", bytes);
  }
  return text;
}

struct Span {
  std::int64_t start_ns = 0;
  std::int64_t end_ns = 0;
};

Span span_of(const std::vector<const TraceEvent*>& events) {
  Span span{events.front()->start_ns, events.front()->end_ns};
  for (const TraceEvent* event : events) {
    span.start_ns = std::min(span.start_ns, event->start_ns);
    span.end_ns = std::max(span.end_ns, event->end_ns);
  }
  return span;
}

using Steps = std::map<std::int64_t, std::vector<const TraceEvent*>>;

Steps by_step(const Trace& trace) {
  Steps steps;
  for (const TraceEvent& event : trace.events) steps[event.step].push_back(&event);
  return steps;
}

// ---- drawing -------------------------------------------------------------------------------------------------------

// Waiting is drawn over the collective, and what the thread does over both.
int layer(Stage stage) { return stage == Stage::kCommunicate ? 0 : stage == Stage::kWait ? 1 : 2; }

std::string draw(const std::vector<const TraceEvent*>& events, const Span& step) {
  std::string row(kDrawnColumns, ' ');
  const double columns_per_ns =
      kDrawnColumns / static_cast<double>(std::max<std::int64_t>(1, step.end_ns - step.start_ns));
  const auto column = [&](std::int64_t ns) {
    return std::min(kDrawnColumns - 1, static_cast<int>(static_cast<double>(ns - step.start_ns) * columns_per_ns));
  };
  for (int drawn = 0; drawn < 3; ++drawn) {
    for (const TraceEvent* event : events) {
      if (layer(event->stage) != drawn) continue;
      for (int c = column(event->start_ns); c <= column(event->end_ns); ++c) {
        row[static_cast<std::size_t>(c)] = kMarks[static_cast<int>(event->stage)];
      }
    }
  }
  return row;
}

// Payload bytes of all collectives of a message.
std::int64_t sent_bytes(const std::vector<const TraceEvent*>& events) {
  std::int64_t bytes = 0;
  for (const TraceEvent* event : events) {
    if (event->stage == Stage::kCommunicate) bytes = capped_add(bytes, event->bytes);
  }
  return bytes;
}

void append_step(std::string& text, std::int64_t number, const std::vector<const TraceEvent*>& events) {
  const Span step = span_of(events);
  std::map<std::int32_t, std::vector<const TraceEvent*>> rows;
  std::int64_t waited_ns = 0;
  for (const TraceEvent* event : events) {
    rows[event->message].push_back(event);
    if (event->stage == Stage::kWait) waited_ns = capped_add(waited_ns, duration_ns(*event));
  }
  std::int64_t step_bytes = 0;
  for (const auto& [message, of_message] : rows) step_bytes = capped_add(step_bytes, sent_bytes(of_message));
  append(text, "\nstep %" PRId64 ": %.2f ms, waited %.2f ms, sent %s\n", number, ms(step.end_ns - step.start_ns),
         ms(waited_ns), bytes_text(step_bytes).c_str());
  append(text, "  %-13s %10s %9s %9s\n", "message", "sent", "from ms", "to ms");
  for (const auto& [message, of_message] : rows) {
    const Span span = span_of(of_message);
    const bool is_message = message != kNoMessage;
    append(text, "  %-13s %10s %9.2f %9.2f  |%s|\n", is_message ? std::to_string(message).c_str() : "(tensors)",
           is_message ? bytes_text(sent_bytes(of_message)).c_str() : "", ms(span.start_ns - step.start_ns),
           ms(span.end_ns - step.start_ns), draw(of_message, step).c_str());
  }
}

std::string heading(const Trace& trace, std::size_t steps) {
  std::string text;
  text += printable(trace.spec);
  append(text, ", rank %d of %d: %zu events of %zu steps", trace.rank, trace.world_size, trace.events.size(), steps);
  if (trace.dropped > 0) append(text, "; %" PRId64 " more found no room", trace.dropped);
  return text + "\n";
}

}  // namespace

std::string trace_to_text(const Trace& trace) {
  const Steps steps = by_step(trace);
  std::string text = heading(trace, steps.size());
  if (!steps.empty()) text += kLegend;
  for (const auto& [number, events] : steps) append_step(text, number, events);
  return text;
}

// ---- tables --------------------------------------------------------------------------------------------------------

std::string summarize_by_stage(const Trace& trace) {
  const Steps steps = by_step(trace);
  std::string text = heading(trace, steps.size());
  std::int64_t all_ns = 0;
  for (const auto& [number, events] : steps) {
    const Span span = span_of(events);
    all_ns = capped_add(all_ns, span.end_ns - span.start_ns);
  }
  const double per_step = 1.0 / static_cast<double>(std::max<std::size_t>(1, steps.size()));
  append(text, "a step took %.3f ms from its first event to its last; \"under way\" overlaps the others\n\n",
         ms(all_ns) * per_step);
  append(text, "%-14s %8s %11s %9s %10s %10s %10s\n", "stage", "events", "ms a step", "of step", "median ms", "p99 ms",
         "longest ms");
  for (int s = 0; s < kStageCount; ++s) {
    const auto stage = static_cast<Stage>(s);
    std::vector<std::int64_t> durations_ns;
    for (const TraceEvent& event : trace.events) {
      if (event.stage == stage) durations_ns.push_back(duration_ns(event));
    }
    if (durations_ns.empty()) continue;
    std::sort(durations_ns.begin(), durations_ns.end());
    const std::int64_t sum_ns = std::accumulate(durations_ns.begin(), durations_ns.end(), std::int64_t{0}, capped_add);
    const std::size_t last = durations_ns.size() - 1;
    append(text, "%-14s %8zu %11.3f %7.1f %% %10.4f %10.4f %10.4f\n", std::string(stage_name(stage)).c_str(),
           durations_ns.size(), ms(sum_ns) * per_step,
           all_ns == 0 ? 0.0 : 100.0 * static_cast<double>(sum_ns) / static_cast<double>(all_ns),
           ms(durations_ns[last / 2]), ms(durations_ns[last * 99 / 100]), ms(durations_ns[last]));
  }
  return text;
}

std::string summarize_by_tensor(const Trace& trace) {
  struct Row {
    std::string name;
    std::int64_t bytes = 0;
    std::int64_t stage_ns[kStageCount] = {};
    std::int64_t all_ns() const {
      return std::accumulate(stage_ns, stage_ns + kStageCount, std::int64_t{0}, capped_add);
    }
  };
  std::vector<Row> rows;
  for (const std::string& name : trace.tensors) rows.push_back({.name = name});
  for (const TraceEvent& event : trace.events) {
    if (event.tensor < 0 || event.tensor >= static_cast<std::int32_t>(rows.size())) continue;
    Row& row = rows[static_cast<std::size_t>(event.tensor)];
    std::int64_t& stage_ns = row.stage_ns[static_cast<int>(event.stage)];
    stage_ns = capped_add(stage_ns, duration_ns(event));
    row.bytes = std::max(row.bytes, event.bytes);
  }
  std::stable_sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.all_ns() > b.all_ns(); });
  const std::size_t steps = by_step(trace).size();
  const double per_step = 1.0 / static_cast<double>(std::max<std::size_t>(1, steps));
  std::string text = heading(trace, steps);
  append(text, "ms a step of this rank's threads\n\n%10s %10s %10s %10s %10s  %s\n", "encode", "decode", "orthogon.",
         "together", "gradient", "tensor");
  for (const Row& row : rows) {
    append(text, "%10.4f %10.4f %10.4f %10.4f %10s  ", ms(row.stage_ns[static_cast<int>(Stage::kEncode)]) * per_step,
           ms(row.stage_ns[static_cast<int>(Stage::kDecode)]) * per_step,
           ms(row.stage_ns[static_cast<int>(Stage::kOrthogonalise)]) * per_step, ms(row.all_ns()) * per_step,
           bytes_text(row.bytes).c_str());
    text += printable(row.name) + "\n";
  }
  return text;
}

}  // namespace cortado
