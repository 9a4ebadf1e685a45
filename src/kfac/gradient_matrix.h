// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The gradients of a layer's weight and bias as one float32 matrix a group, the bias its last column, and back.
#pragma once

#include "cortado/kfac.h"

namespace cortado {

// matrix: groups x outputs x a_dim. Zeros for a gradient that is not there.
void load_gradient(const KfacLayer& layer, const KfacGradient& gradient, float* matrix);

// gradient = matrix * scale, rounded to its dtype; nothing for one that is not there.
void store_gradient(const KfacLayer& layer, const float* matrix, float scale, const KfacGradient& gradient);

}  // namespace cortado
