// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cortado/codec.h"

namespace cortado {

// `topk(density=0.01)`: the values of largest magnitude and their positions, of a tensor or of each block. See spec.md.
const CodecRow& topk_row();

}  // namespace cortado
