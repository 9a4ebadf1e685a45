// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Signs and scales of a tensor in one pass, and back; the same bytes on every SIMD target. The layout is spec.md's.
//
// Preconditions: elems > 0; block_elems is a multiple of 16 or at least elems; input, output and payload do not
// overlap. Pointers need no alignment. The floating-point environment is the default one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cortado/tensor_view.h"

namespace cortado {

enum class SignScale { kMeanAbs, kTwoMeans, kNone };

// What a block decodes to: where the bit is 0, and where it is 1.
struct SignLevels {
  float positive;
  float negative;
};

constexpr std::int64_t sign_scale_bytes(SignScale scale) { return scale == SignScale::kTwoMeans ? 8 : 4; }
constexpr std::int64_t sign_blocks(std::int64_t elems, std::int64_t block_elems) {
  return elems / block_elems + (elems % block_elems != 0);
}

// The two sections of a payload: sign_blocks() scales of sign_scale_bytes() each, and one bit a value.
void sign_encode(const void* input, DType dtype, std::int64_t elems, std::int64_t block_elems, SignScale scale,
                 std::byte* scales, std::byte* bits);

void sign_decode(const std::byte* scales, const std::byte* bits, SignScale scale, std::int64_t block_elems,
                 void* output, DType dtype, std::int64_t elems);

// The levels of one block, from its scale in a payload.
SignLevels read_sign_levels(const std::byte* scales, std::int64_t block, SignScale scale);

}  // namespace cortado
