// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Many layers in one message of `compso`: each with statistics and steps of its own, one pass over their values, and
// tables of codes that they share where they are alike. What the codec does with one tensor, for the exchange of many.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "codec/compso/compso_grid.h"
#include "cortado/codec.h"

namespace cortado {

// Upper bounds for layers of these numbers of elements, at most kMaxRansCodes together; pure.
std::uint64_t max_compso_bytes(const CompsoSettings& settings, std::span<const std::int64_t> layer_elems, DType dtype);
std::uint64_t compso_scratch_bytes(const CompsoSettings& settings, std::span<const std::int64_t> layer_elems);

// Returns the bytes written. Layers are of one dtype: fp32, fp16 or bf16. `payload` has max_compso_bytes(), `scratch`
// compso_scratch_bytes(); nothing overlaps, no alignment is asked.
std::uint64_t encode_layers(const CompsoSettings& settings, std::span<const ConstTensorView> layers,
                            const EncodeContext& context, std::byte* payload, std::byte* scratch);

// The inverse, for layers of the shapes and the dtype that were encoded. kCorruptData for what can't have been written
// for them.
Status decode_layers(const CompsoSettings& settings, std::span<const std::byte> payload,
                     std::span<const TensorView> layers, std::byte* scratch);

}  // namespace cortado
