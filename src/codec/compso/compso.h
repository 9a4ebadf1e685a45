// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cortado/codec.h"

namespace cortado {

// `compso(bound=0.004)`: multiples of a share of the range, small values as 0, entropy-coded. See spec.md.
const CodecRow& compso_row();

}  // namespace cortado
