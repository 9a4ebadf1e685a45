// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <vector>

#include "bucket/layout.h"
#include "cortado/engine.h"
#include "engine/treatment.h"

namespace cortado {

// The messages of a compressed step of an engine. Pure: the same on every rank.
struct RoundLayouts {
  std::vector<Layout> first;     // of the first (or only) round: one, or two that take turns
  std::optional<Layout> second;  // of Power-SGD
};

// Of all methods but kNone. `treatments`: choose_treatments(); `codec`: that of kCodec.
RoundLayouts choose_round_layouts(const std::vector<EngineTensor>& tensors, const std::vector<Treatment>& treatments,
                                  const EngineOptions& options, const TrainedCodec& codec);

// The messages of a step in which nothing is compressed yet.
Layout warm_up_layout(const std::vector<EngineTensor>& tensors, const std::vector<Treatment>& treatments);

}  // namespace cortado
