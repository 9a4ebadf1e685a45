// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The loops of `quant` over a piece of a tensor: statistics of blocks, values to codes, codes to values. The same bits
// on every SIMD target.
//
// Preconditions: a piece begins at a multiple of 256 values of its tensor and has at most kMaxPieceElems, a multiple of
// 16: behind a tensor's last value stand zeros. Pointers need no alignment, nothing overlaps. The floating-point
// environment is the default one; flushing denormals changes nothing where steps are below 2^126. What is read next
// lies `prefetch_elems` ahead of what is read now.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/philox.h"
#include "core/streaming.h"

namespace cortado {

constexpr std::int64_t kMaxPieceElems = 1024;
constexpr std::int64_t kSmallestBlockElems = 32;

enum class Rounding : std::uint8_t { kNearest, kDeadZone, kStochastic, kDither };
enum class BlockScale : std::uint8_t { kMax, kRms, kL2, kRange };

// Of one block, or of a part of one.
struct BlockStats {
  std::uint32_t max_magnitude = 0;  // bits of the largest |x|; from kInfinityBits on, something is not finite
  float low = 0, high = 0;          // kRange: the smallest and the largest of the values and 0
  double squares = 0;               // kRms, kL2: their sum
};

constexpr std::uint32_t kInfinityBits = 0x7f800000u;

// Statistics of every `block_elems` (a multiple of 16) of the values, the last block perhaps shorter. Squares are
// scaled by a power of two and added up in 16 lanes of float32, value i in lane i % 16; then in double lane i + 8 to
// lane i, i + 4 to i, i + 2 to i and 1 to 0.
void measure_blocks(BlockScale scale, const float* values, std::int64_t elems, std::int64_t block_elems,
                    BlockStats* stats);

// Of two neighbouring parts of one block, the left one first.
CORTADO_HD inline BlockStats joined(const BlockStats& left, const BlockStats& right) {
  return {.max_magnitude = std::max(left.max_magnitude, right.max_magnitude),
          .low = std::min(left.low, right.low),
          .high = std::max(left.high, right.high),
          .squares = left.squares + right.squares};
}

// Where the grid of one block lies.
struct BlockGrid {
  float step = 0;                                        // NaN: something in the block is not finite
  float inverse = 0;                                     // 1 / step, or 0 if all values become 0
  float threshold = -1;                                  // magnitudes up to it become 0
  float reach = std::numeric_limits<float>::infinity();  // what lies beyond must be clipped to it first

  bool takes_all() const { return reach == std::numeric_limits<float>::infinity() && step == step; }
};

// A piece of a tensor: value i of it lies in block i >> log2_block_elems of `blocks`.
struct BlockPiece {
  int log2_block_elems;
  const BlockGrid* blocks;
  std::int64_t first;  // the piece begins at this value of the tensor
  std::int64_t elems;
};

// Of the random numbers of one tensor in one step.
struct RandomKey {
  PhiloxKey key = {};
  std::uint64_t step = 0;
};
static_assert(sizeof(RandomKey) == 16);  // as payloads have it

// A level is the integer nearest to |x| / step - shift, and stands for level + outwards; 0 for 0.
struct DeadZone {
  float shift, outwards;
};
constexpr DeadZone kDeadZone = {.shift = 0.15f, .outwards = 0.05f};

struct Levels {
  Rounding rounding;
  float largest;         // from -largest to largest; 1/2 for one bit
  bool filters = false;  // thresholds count
  DeadZone dead_zone = kDeadZone;
};

// codes[i] = level + levels.largest, from 0 to 2 * levels.largest. All values are finite.
void quantise_values(const Levels& levels, const BlockPiece& piece, const RandomKey& random, const float* values,
                     std::int64_t prefetch_elems, std::uint8_t* codes);

// Only `step` of the blocks is read. `streams`: past the caches, where `values` is aligned to 64 bytes.
void dequantise_values(const Levels& levels, const BlockPiece& piece, const RandomKey& random,
                       const std::uint8_t* codes, bool streams, float* values);

// The sum over the values of E[(x - decoded)^2] / step^2 on a grid without end, in the lanes of
// measure_blocks().
double sum_squared_errors(Rounding rounding, float step, const float* values, std::int64_t elems);

// What a dead zone does on a grid without end, 0 <= shift <= 1/2.
struct DeadZoneSums {
  double zeros = 0;                 // (x / step)^2 of values at level 0
  double offsets = 0, squares = 0;  // |x| / step - level of the others, and its square
  double others = 0;                // how many
};
DeadZoneSums sum_dead_zone(float shift, float step, const float* values, std::int64_t elems);

}  // namespace cortado
