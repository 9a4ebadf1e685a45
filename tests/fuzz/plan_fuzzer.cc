// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Any text as a plan: reading ends without a crash, and what is accepted comes back the same.
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/check.h"
#include "cortado/plan.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cortado;
  const Result<Plan> plan = plan_from_json({reinterpret_cast<const char*>(data), size});
  if (!plan.ok()) return 0;
  const std::string written = plan_to_json(plan.value());
  const Plan again = plan_from_json(written).value();
  CORTADO_CHECK(again == plan.value(), "%s", written.c_str());
  CORTADO_CHECK(plan_hash(again) == plan_hash(plan.value()));
  return 0;
}
