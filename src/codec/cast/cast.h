// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cortado/codec.h"

namespace cortado {

// `cast(bf16)` and `cast(fp16)`: every value as a 16-bit float, rounded to nearest even. See spec.md.
const CodecRow& cast_row();

// The 16-bit floats that payloads of `codec` are, one for each value and rounded as cast_kernels.h does; fp32: they are
// something else.
DType cast_dtype(const Codec& codec);

}  // namespace cortado
