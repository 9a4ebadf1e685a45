// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What the binding of every codec checks before it calls a kernel. Messages begin with the codec's specification and
// name the call, the shape, what was got and what was expected; texts are made only when something is wrong.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cortado/codec.h"

namespace cortado {

// The view is a tensor (shape, dtype, memory), payload and scratch are as large as the codec asks for, and no two of
// the three overlap.
Status check_encode(const Codec& codec, ConstTensorView input, std::span<const std::byte> payload,
                    std::span<const std::byte> scratch);

// The same before decoding, except that the size of the payload is for check_payload_bytes() or the decoder to judge.
Status check_decode(const Codec& codec, std::span<const std::byte> payload, TensorView output,
                    std::span<const std::byte> scratch);

// For codecs whose payloads have one size for a shape.
Status check_payload_bytes(const Codec& codec, std::span<const std::byte> payload, TensorView output,
                           std::uint64_t expected_bytes);

// What is wrong with a payload: kCorruptData, "quant(...): decode of 3 x 5 fp32: <what>".
Status corrupt_payload(const Codec& codec, TensorView output, const char* what);

// The same checks for the two calls of a Quantiser, whose side section has one size for a shape.
Status check_quantise(const Codec& codec, const Quantiser& quantiser, ConstTensorView input,
                      std::span<const std::uint8_t> codes, std::span<const std::byte> side,
                      std::span<const std::byte> scratch);
Status check_dequantise(const Codec& codec, const Quantiser& quantiser, std::span<const std::uint8_t> codes,
                        std::span<const std::byte> side, TensorView output, std::span<const std::byte> scratch);

// "cast(bf16) takes fp32, fp16 and bf16, got uint8".
Status unsupported_dtype(const Codec& codec, DType dtype, const char* taken);

bool overlap(const void* a, std::uint64_t a_bytes, const void* b, std::uint64_t b_bytes);

}  // namespace cortado
