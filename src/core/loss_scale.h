// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <limits>

#include "core/device.h"

namespace cortado {

// Gradients are scaled in float32; whoever looks for overflow may let the scale grow as far as that goes.
inline bool is_loss_scale(double scale) { return scale > 0 && scale <= std::numeric_limits<float>::max(); }

// What makes unscaled units of gradients that carry a loss scale.
CORTADO_HD inline float unscale_of(double loss_scale) { return static_cast<float>(1.0 / loss_scale); }

// What is left of a sum that a gradient is taken from is rounding if it is no more than this share of the gradient.
constexpr float kRoundingShare = 0x1p-20f;

// Elements of a gradient from this magnitude on count as not finite: neither they nor their product with gradient_scale
// may bring the sum over ranks near overflow.
CORTADO_HD inline float gradient_limit_of(float gradient_scale) {
  const float magnitude = gradient_scale < 0 ? -gradient_scale : gradient_scale;
  return 1e38f / (magnitude > 1.0f ? magnitude : 1.0f);
}

}  // namespace cortado
