// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cortado/codec.h"

namespace cortado {

// `rans` and `rans(chunk_codes=4096)`: codes of 1 to 8 bits, one a byte, entropy-coded. See spec.md.
const CodecRow& rans_row();

}  // namespace cortado
