// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/device.h"

namespace cortado {

// What makes unscaled units of gradients that carry a loss scale.
CORTADO_HD inline float unscale_of(double loss_scale) { return static_cast<float>(1.0 / loss_scale); }

// Elements of a gradient from this magnitude on count as not finite: neither they nor their product with gradient_scale
// may bring the sum over ranks near overflow.
CORTADO_HD inline float gradient_limit_of(float gradient_scale) {
  const float magnitude = gradient_scale < 0 ? -gradient_scale : gradient_scale;
  return 1e38f / (magnitude > 1.0f ? magnitude : 1.0f);
}

}  // namespace cortado
