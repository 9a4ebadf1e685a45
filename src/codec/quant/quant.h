// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cortado/codec.h"

namespace cortado {

// `quant(bits=4)`: every value as one of a few levels, multiples of a step per block. See spec.md.
const CodecRow& quant_row();

}  // namespace cortado
