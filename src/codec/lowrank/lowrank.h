// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Low rank as a codec that keeps nothing between calls: one matrix in, one payload out (spec.md). Training does not go
// this way: the engine keeps factors and residuals and calls the kernels (engine/lowrank_tensor.h).
#pragma once

#include "cortado/codec.h"

namespace cortado {

// `acp(rank=4)`: the row factor on a keyed random basis, which the decoder draws again.
const CodecRow& acp_row();

// `power(rank=4)`: both factors, after one power iteration from that basis.
const CodecRow& power_row();

}  // namespace cortado
