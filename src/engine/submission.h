// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What every engine asks of gradients that are handed over in a step.
#pragma once

#include <span>
#include <vector>

#include "cortado/engine.h"

namespace cortado {

// Of one tensor, in the step in hand.
struct SubmittedGradient {
  void* data = nullptr;
  bool submitted = false;
};

// Notes them in `submitted`, one entry a tensor: known tensors, each once a step, with memory where they have elements.
// After an error none of them is noted.
Status note_submitted(std::span<const Gradient> gradients, const std::vector<EngineTensor>& tensors,
                      std::vector<SubmittedGradient>* submitted);

}  // namespace cortado
