// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cortado/codec.h"

namespace cortado {

// `float_rans`: fp32, fp16 and bf16 with every bit, the exponents entropy-coded. See spec.md.
const CodecRow& float_rans_row();

}  // namespace cortado
