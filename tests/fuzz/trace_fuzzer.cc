// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Any text as a stored trace: reading ends without a crash, what is accepted comes back the same, and every view of it
// can be drawn.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/check.h"
#include "cortado/trace.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cortado;
  const Result<Trace> trace = parse_trace({reinterpret_cast<const char*>(data), size});
  if (!trace.ok()) return 0;
  CORTADO_CHECK(parse_trace(trace_to_json(trace.value())).value() == trace.value());
  CORTADO_CHECK(!trace_to_text(trace.value()).empty());
  CORTADO_CHECK(!trace_to_chrome(trace.value()).empty());
  CORTADO_CHECK(!summarize_by_stage(trace.value()).empty());
  CORTADO_CHECK(!summarize_by_tensor(trace.value()).empty());
  return 0;
}
