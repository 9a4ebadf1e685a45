// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Signs and scales of a tensor in one pass, and back; the same bytes on every SIMD target. The layout is spec.md's.
//
// Preconditions: elems > 0; block_elems is a multiple of 16 or at least elems; input, output and payload do not
// overlap. Pointers need no alignment. The floating-point environment is the default one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/sign/sign_levels.h"
#include "cortado/tensor_view.h"

namespace cortado {

// The two sections of a payload: sign_blocks() scales of sign_scale_bytes() each, and one bit a value.
void sign_encode(const void* input, DType dtype, std::int64_t elems, std::int64_t block_elems, SignScale scale,
                 std::byte* scales, std::byte* bits);

void sign_decode(const std::byte* scales, const std::byte* bits, SignScale scale, std::int64_t block_elems,
                 void* output, DType dtype, std::int64_t elems);

}  // namespace cortado
