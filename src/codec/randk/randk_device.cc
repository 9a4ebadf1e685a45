// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/randk/randk_device.h"

#include "codec/device_layout.h"
#include "codec/randk/randk_pattern.h"

namespace cortado {

Result<RandkPlan> RandkPlan::make(const ParameterValues& values, DeviceLayout& layout) {
  RandkPlan plan;
  plan.is_unbiased = values.word("scale") == "unbiased";
  std::vector<RandkRuns> runs;
  std::vector<std::int64_t> kept;
  for (const std::int64_t elems : layout.elems()) {
    const RandkPattern pattern = RandkPattern::of(values.real("density"), values.integer("block"), elems);
    runs.push_back({pattern.elems, pattern.runs, pattern.run_elems});
    kept.push_back(pattern.kept());
  }
  plan.tiles = layout.tile(RandkSweep::kTileElems);
  plan.kept = layout.tile(kept, RandkMove::kTileElems);
  plan.runs = layout.table<RandkRuns>(runs);
  plan.not_finite = layout.scratch<std::uint32_t>(runs.size());
  return plan;
}

}  // namespace cortado
