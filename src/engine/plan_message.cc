// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "engine/plan_message.h"

#include "engine/low_rank_message.h"
#include "engine/scheme_message.h"

namespace cortado {

Result<std::unique_ptr<PlanMessage>> PlanMessage::make(const Setup& setup) {
  const int levels = static_cast<int>(setup.levels->topology().levels.size());
  return sums_factors(*setup.bucket, levels) ? LowRankMessage::make(setup) : SchemeMessage::make(setup);
}

}  // namespace cortado
