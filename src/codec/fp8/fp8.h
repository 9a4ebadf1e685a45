// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "codec/fp8/fp8_kernels.h"
#include "cortado/codec.h"

namespace cortado {

// `fp8(e4m3)` and `fp8(e5m2)`: every value as an 8-bit float, with a power of two as scale a block. See spec.md.
const CodecRow& fp8_row();

Fp8Format fp8_format_named(const std::string& word);

}  // namespace cortado
