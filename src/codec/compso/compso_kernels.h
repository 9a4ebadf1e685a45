// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The loops of `compso` over a piece of a layer: the rounding of `quant`, but to levels of any size, of which a code
// keeps the lowest 8 or 16 bits. The same bits on every SIMD target. Preconditions as in quant_kernels.h.
#pragma once

#include <cstdint>

#include "codec/compso/compso_grid.h"
#include "codec/quant/quant_kernels.h"
#include "codec/rans/rans_kernels.h"

namespace cortado {

struct CompsoRange {
  float low = 0, high = 0;          // the smallest and the largest value
  std::uint32_t max_magnitude = 0;  // bits of the largest |x|; from kInfinityBits on, something is not finite
};

// Of any number of values, at least 1.
CompsoRange measure_range(const float* values, std::int64_t elems, std::int64_t prefetch_elems);

// Where the low and the high bytes of codes are; `high` is null where codes have one.
struct CompsoCodes {
  std::uint8_t* low;
  std::uint8_t* high;
};
// What counts them, or null; those of low bytes and of high ones.
struct CompsoCounts {
  RansCounts* low = nullptr;
  RansCounts* high = nullptr;
};

// All values lie in one block, piece.blocks[0]; its `reach` is in steps here, at most 2^21, and levels are clipped to
// it. levels.largest is not used. Counting costs little beside: it keeps the memory busy, and quantising the vector
// units. The zeros behind a tensor's last value are counted too, as codes of level 0.
void compso_quantise(const Levels& levels, const BlockPiece& piece, const RandomKey& random, const float* values,
                     std::int64_t prefetch_elems, CompsoCodes codes, CompsoCounts counts);

// No level is below `first_level`, which lies between -2^22 and 2^22.
void compso_dequantise(const Levels& levels, const BlockPiece& piece, const RandomKey& random, std::int32_t first_level,
                       CompsoCodes codes, bool streams, float* values);

}  // namespace cortado
