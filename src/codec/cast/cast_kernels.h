// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Between float32 and 16-bit floats, as core/float16.h defines it for one value; the same bytes on every SIMD target.
//
// Preconditions: elems >= 0; input and output do not overlap. Pointers need no
// alignment. The floating-point environment is the default one (round to nearest), though flushing denormals to zero
// changes nothing but the scaled variants.
#pragma once

#include <cstdint>

namespace cortado {

// `streams`: past the caches, where the output is aligned to 64 bytes (core/streaming.h).
void fp32_to_bf16(const float* input, std::int64_t elems, std::uint16_t* output, bool streams = false);
void fp32_to_fp16(const float* input, std::int64_t elems, std::uint16_t* output, bool streams = false);
void bf16_to_fp32(const std::uint16_t* input, std::int64_t elems, float* output, bool streams = false);
void fp16_to_fp32(const std::uint16_t* input, std::int64_t elems, float* output, bool streams = false);

// output[i] = cast(input[i] * scale), the product rounded to float32 first. `scale` is finite and not zero.
void scale_and_cast_bf16(const float* input, float scale, std::int64_t elems, std::uint16_t* output);
void scale_and_cast_fp16(const float* input, float scale, std::int64_t elems, std::uint16_t* output);

// The same, and the sums of squares of the input and of what is lost, input[i] - output[i] * unscale. Element i belongs
// to the sum i % 16, and these 16 are added in order: the same bits on every target. If any of the output is Inf or
// NaN, one of the two is too.
struct CastSquares {
  float of_values = 0;
  float of_differences = 0;
};
CastSquares measured_cast_bf16(const float* input, float scale, float unscale, std::int64_t elems,
                               std::uint16_t* output);
CastSquares measured_cast_fp16(const float* input, float scale, float unscale, std::int64_t elems,
                               std::uint16_t* output);

}  // namespace cortado
