// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// BlockCodec (block_codec.h) on a device: codes of up to 8 bits on the grid of their block. A block of 256 threads
// takes a tile of 4096 values; a thread has 16 of them, one a row, in one of the 16 lanes of the format: then one
// Philox block serves all its random numbers, its sums have the order of the specification, and its codes are two
// streams of the packing. Where blocks are larger than a tile, they are measured in a launch before. A Scheme is the
// rest:
//
//   static constexpr std::int64_t kSideBytes;            of a block
//   int bits() const;  BlockScale scale() const;  std::int64_t block_elems() const;
//   bool is_random() const;  bool carries_key() const;   as for BlockCodec
//   BlockGrid grid(const BlockStats&, std::int64_t elems, float largest_value) const;
//   void put(const BlockGrid&, std::byte* side) const;
//   bool take(const std::byte* side, float largest_value, BlockGrid*) const;   false: no encoder wrote it
//   std::uint32_t code_of(const BlockGrid&, float value, std::uint32_t random_byte) const;
//   float value_of(const BlockGrid&, std::uint32_t code, std::uint32_t random_byte) const;
//   bool is_legal(std::uint32_t code) const;
#pragma once

#include <algorithm>
#include <bit>
#include <type_traits>

#include "codec/device_workspace.h"
#include "codec/pieces.h"
#include "codec/quant/quant_kernels.h"
#include "core/device_bits.h"

namespace cortado {

constexpr int kBlockTileThreads = 256, kBlockLanes = 16, kBlockRows = 16;
constexpr std::int64_t kBlockTileElems = std::int64_t{kBlockTileThreads} * kBlockRows;
constexpr int kMostTileParts = static_cast<int>(kBlockTileElems / kSmallestBlockElems);
constexpr std::int64_t kDeviceGroupElems = 128;  // of the packing
constexpr int kLog2ThreadElems = 8;              // values that 16 threads share
static_assert(1 << kLog2ThreadElems == kBlockLanes * kBlockRows);
constexpr std::int64_t kTilePieces = kBlockTileElems / kMaxPieceElems;

// The 16 values of a thread: of rows of 16, the same lane.
struct LaneValues {
  float rows[kBlockRows];
};

CORTADO_HD constexpr std::int64_t first_of_thread(int t) {
  return std::int64_t{t / kBlockLanes} * (kBlockLanes * kBlockRows) + t % kBlockLanes;
}

// Of a tile of `elems` values.
CORTADO_HD constexpr std::int64_t rows_of_thread(std::int64_t elems, int t) {
  return (elems - first_of_thread(t) + kBlockLanes - 1) / kBlockLanes;
}

CORTADO_HD inline LaneValues load_lane(const TensorEntry& tensor, const Tile& tile, int t) {
  LaneValues values;
  load_values<kBlockRows>(tensor.data, tensor.dtype, tile.first + first_of_thread(t), kBlockLanes,
                          rows_of_thread(tile.elems, t), values.rows);
  return values;
}

// The Philox block of a thread's values, which begin at `first` of the tensor, a multiple of 256, but for its lane.
CORTADO_HD inline PhiloxBlock random_of_lane(const PhiloxStream& stream, std::int64_t tile_first, int t) {
  const std::int64_t of_tile = (tile_first + first_of_thread(t) - t % kBlockLanes) / kBlockRows;
  return stream.block(static_cast<std::uint64_t>(of_tile + t % kBlockLanes));
}
CORTADO_HD inline std::uint32_t random_byte(const PhiloxBlock& random, int row) {
  return random[static_cast<std::size_t>(row / 4)] >> (8 * (row % 4)) & 0xffu;
}
// Where the step of a block is NaN, that NaN: a product of it is another one on a GPU.
CORTADO_HD inline float times_step(float value, float step) { return step != step ? step : value * step; }

// 1 + (byte + 1/2) / 256: the byte and the half become the upper mantissa bits of 1.
CORTADO_HD inline float one_and_fraction(std::uint32_t byte) { return std::bit_cast<float>(0x3f804000u | byte << 15); }

// Keeps the order of floats, and that of their negatives complemented; NaN do not matter.
CORTADO_HD inline std::uint32_t ordered_bits(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
CORTADO_HD inline float from_ordered_bits(std::uint32_t ordered) {
  return std::bit_cast<float>((ordered & 0x80000000u) != 0 ? ordered & 0x7fffffffu : ~ordered);
}

// ---- statistics of parts of a tile ---------------------------------------------------------------------------------

struct PartMemory {
  double squares[kMostTileParts];
  std::uint32_t magnitude[kMostTileParts];
  std::uint32_t low[kMostTileParts], high[kMostTileParts];  // ordered bits, of `low` complemented
  float lanes[kBlockTileThreads];
};

CORTADO_HD inline BlockStats stats_of_part(const PartMemory& parts, std::int64_t i, BlockScale scale) {
  BlockStats stats;
  stats.max_magnitude = parts.magnitude[i];
  if (scale == BlockScale::kRange) {
    stats.low = from_ordered_bits(~parts.low[i]);
    stats.high = from_ordered_bits(parts.high[i]);
  }
  if (scale == BlockScale::kRms || scale == BlockScale::kL2) stats.squares = parts.squares[i];
  return stats;
}

// Loops over some of the 16 rows count by constants, here and below: what is indexed otherwise is no register.
CORTADO_HD inline std::uint32_t largest_magnitude(const LaneValues& values, int begin, int count) {
  std::uint32_t largest = 0;
  for (int row = 0; row < kBlockRows; ++row) {
    if (count < kBlockRows && (row < begin || row >= begin + count)) continue;
    largest = std::max(largest, std::bit_cast<std::uint32_t>(values.rows[row]) & 0x7fffffffu);
  }
  return largest;
}

struct LaneRange {
  std::uint32_t low, high;  // as in PartMemory
};
CORTADO_HD inline LaneRange range_of(const LaneValues& values, int begin, int count) {
  float low = 0, high = 0;
  for (int row = 0; row < kBlockRows; ++row) {
    if (count < kBlockRows && (row < begin || row >= begin + count)) continue;
    const float v = values.rows[row];
    low = v < low ? v : low;
    high = v > high ? v : high;
  }
  return {~ordered_bits(low), ordered_bits(high)};
}

// Fills `parts` with the statistics of every `part_elems` values, a power of two from 32 to 1024; as measure_blocks().
template <class Block>
CORTADO_HD void measure_parts(Block& block, typename Block::template PerThread<LaneValues>& values, BlockScale scale,
                              int part_elems, PartMemory& parts) {
  constexpr int kThreadGroup = kBlockLanes * kBlockRows;  // values of 16 threads
  block.each([&](int t) {
    if (t >= kMostTileParts) return;
    parts.magnitude[t] = 0;
    parts.low[t] = ~ordered_bits(0);
    parts.high[t] = ordered_bits(0);
    parts.squares[t] = 0;
  });
  const int rows_a_part = part_elems / kBlockLanes < kBlockRows ? part_elems / kBlockLanes : kBlockRows;
  const int log2_part_elems = trailing_zeros(static_cast<std::uint64_t>(part_elems));
  const auto part_of = [&](int t, int row) {
    return static_cast<int>(first_of_thread(t) + row * kBlockLanes) >> log2_part_elems;
  };
  // Sixteen threads find the largest of their part's values together, and one tells it.
  const bool is_range = scale == BlockScale::kRange;
  for (int begin = 0; begin < kBlockRows; begin += rows_a_part) {
    typename Block::template PerThread<std::uint32_t> magnitudes;
    typename Block::template PerThread<LaneRange> ranges;
    block.each_in_warp([&](int t) {
      magnitudes[t] = largest_magnitude(values[t], begin, rows_a_part);
      if (is_range) ranges[t] = range_of(values[t], begin, rows_a_part);
    });
    block.butterfly(magnitudes, kBlockLanes, [](std::uint32_t a, std::uint32_t b) { return std::max(a, b); });
    if (is_range) {
      block.butterfly(ranges, kBlockLanes, [](const LaneRange& a, const LaneRange& b) {
        return LaneRange{std::max(a.low, b.low), std::max(a.high, b.high)};
      });
    }
    block.each_in_warp([&](int t) {
      if (t % kBlockLanes != 0) return;
      const int part = part_of(t, begin);
      block.raise(&parts.magnitude[part], magnitudes[t]);
      if (!is_range) return;
      block.raise(&parts.low[part], ranges[t].low);
      block.raise(&parts.high[part], ranges[t].high);
    });
  }
  block.each([](int) {});
  if (scale != BlockScale::kRms && scale != BlockScale::kL2) return;
  // A lane's squares are added in the order of rows, through all 16 rows of a thread and from thread to thread.
  const int threads_a_part = part_elems <= kThreadGroup ? 1 : part_elems / kThreadGroup;
  for (int begin = 0; begin < kBlockRows; begin += rows_a_part) {
    typename Block::template PerThread<double> sums;
    for (int turn = 0; turn < threads_a_part; ++turn) {
      block.each([&](int t) {
        if (t / kBlockLanes % threads_a_part != turn) return;
        const std::uint32_t exponent = std::clamp(parts.magnitude[part_of(t, begin)] >> 23, 2u, 252u);
        const float scaled = std::bit_cast<float>((254u - exponent) << 23);
        float sum = turn == 0 ? 0 : parts.lanes[t - kBlockLanes];
        for (int row = 0; row < kBlockRows; ++row) {
          if (row < begin || row >= begin + rows_a_part) continue;
          const float v = values[t].rows[row] * scaled;
          sum += v * v;
        }
        parts.lanes[t] = sum;
      });
    }
    block.each([&](int t) { sums[t] = static_cast<double>(parts.lanes[t]); });
    block.butterfly(sums, kBlockLanes, [](double a, double b) { return a + b; });
    block.each([&](int t) {
      if (t % kBlockLanes != 0 || t / kBlockLanes % threads_a_part != threads_a_part - 1) return;
      const int part = part_of(t, begin);
      const std::uint32_t exponent = std::clamp(parts.magnitude[part] >> 23, 2u, 252u);
      const double unit = std::bit_cast<float>(exponent << 23);
      parts.squares[part] = sums[t] * unit * unit;
    });
  }
}

// ---- packing of a tile ---------------------------------------------------------------------------------------------

struct PackedMemory {
  alignas(16) std::byte bytes[kBlockTileElems];
  std::uint8_t tail[kDeviceGroupElems];  // codes behind the last whole group
};

// Calls f(bits), for the most common numbers with a constant, which makes single instructions of its loops.
template <class F>
CORTADO_HD void with_bits(int bits, const F& f) {
  if (bits == 8) return f(std::integral_constant<int, 8>());
  if (bits == 4) return f(std::integral_constant<int, 4>());
  f(bits);
}

CORTADO_HD inline std::int64_t packed_tile_bytes(std::int64_t elems, int bits) { return (elems * bits + 7) / 8; }

// The codes of a thread, in the order of its rows; `elems` are those of the tile. `Bits` is int, or a constant.
template <class Bits>
CORTADO_HD void pack_lane(const std::uint8_t (&codes)[kBlockRows], std::int64_t elems, Bits bits, int t,
                          PackedMemory& packed) {
  constexpr int kGroupRows = kDeviceGroupElems / kBlockLanes;
  const std::int64_t groups = elems / kDeviceGroupElems;
  for (int half = 0; half < kBlockRows / kGroupRows; ++half) {
    const std::int64_t group = t / kBlockLanes * (kBlockRows / kGroupRows) + half;
    if (group < groups) {
      std::uint64_t stream = 0;
      for (int row = 0; row < kGroupRows; ++row) {
        stream |= static_cast<std::uint64_t>(codes[half * kGroupRows + row]) << (row * bits);
      }
      std::byte* const to = packed.bytes + group * kBlockLanes * bits + t % kBlockLanes;
      for (int byte = 0; byte < bits; ++byte) to[byte * kBlockLanes] = static_cast<std::byte>(stream >> (8 * byte));
    } else if (group == groups) {
      for (int row = 0; row < kGroupRows; ++row) {
        packed.tail[row * kBlockLanes + t % kBlockLanes] = codes[half * kGroupRows + row];
      }
    }
  }
}

// Byte `t` of the stream of bits behind the last whole group.
CORTADO_HD inline void pack_tail(std::int64_t elems, int bits, int t, PackedMemory& packed) {
  const auto tail = static_cast<int>(elems % kDeviceGroupElems);
  if (t >= (tail * bits + 7) / 8) return;
  std::uint32_t byte = 0;
  for (int bit = 0; bit < 8; ++bit) {
    const int at = 8 * t + bit;
    if (at < tail * bits) byte |= (packed.tail[at / bits] >> (at % bits) & 1u) << bit;
  }
  packed.bytes[(elems - tail) * bits / 8 + t] = static_cast<std::byte>(byte);
}

template <class Bits>
CORTADO_HD void unpack_lane(const PackedMemory& packed, std::int64_t elems, Bits bits, int t,
                            std::uint8_t (&codes)[kBlockRows]) {
  constexpr int kGroupRows = kDeviceGroupElems / kBlockLanes;
  const std::int64_t groups = elems / kDeviceGroupElems;
  for (int half = 0; half < kBlockRows / kGroupRows; ++half) {
    const std::int64_t group = t / kBlockLanes * (kBlockRows / kGroupRows) + half;
    std::uint64_t stream = 0;
    if (group < groups) {
      const std::byte* const from = packed.bytes + group * kBlockLanes * bits + t % kBlockLanes;
      for (int byte = 0; byte < bits; ++byte) {
        stream |= static_cast<std::uint64_t>(from[byte * kBlockLanes]) << (8 * byte);
      }
    }
    for (int row = 0; row < kGroupRows; ++row) {
      const auto code = static_cast<std::uint32_t>(stream >> (row * bits)) & ((1u << bits) - 1);
      const bool is_tail = group == groups && row * kBlockLanes + t % kBlockLanes < elems % kDeviceGroupElems;
      codes[half * kGroupRows + row] =
          is_tail ? packed.tail[row * kBlockLanes + t % kBlockLanes] : static_cast<std::uint8_t>(code);
    }
  }
}

CORTADO_HD inline void unpack_tail(std::int64_t elems, int bits, int t, PackedMemory& packed) {
  const auto tail = static_cast<int>(elems % kDeviceGroupElems);
  if (t >= tail) return;
  std::uint32_t code = 0;
  for (int bit = 0; bit < bits; ++bit) {
    const std::int64_t at = (elems - tail) * bits + t * bits + bit;
    code |= (std::to_integer<std::uint32_t>(packed.bytes[at / 8]) >> (at % 8) & 1u) << bit;
  }
  packed.tail[t] = static_cast<std::uint8_t>(code);
}

// ---- kernels -------------------------------------------------------------------------------------------------------

// Where the blocks of a tensor and its payload lie.
template <class Scheme>
struct BlockShape {
  CORTADO_HD BlockShape(const Scheme& scheme, std::int64_t elems)
      : block_elems(scheme.block_elems() < elems ? scheme.block_elems() : elems),
        log2_block_elems(trailing_zeros(static_cast<std::uint64_t>(scheme.block_elems()))),
        blocks(((elems - 1) >> log2_block_elems) + 1),
        key_bytes(scheme.carries_key() ? sizeof(RandomKey) : 0),
        codes_at(key_bytes + blocks * Scheme::kSideBytes) {}

  CORTADO_HD bool is_large() const { return block_elems > kBlockTileElems; }
  // All values of a thread lie in one block.
  CORTADO_HD bool has_one_a_thread() const { return log2_block_elems >= kLog2ThreadElems; }
  CORTADO_HD std::int64_t elems_of(std::int64_t block, std::int64_t elems) const {
    const std::int64_t left = elems - block * block_elems;
    return left < block_elems ? left : block_elems;
  }

  std::int64_t block_elems;
  int log2_block_elems;  // of the scheme's, of which a tensor's only block may have fewer
  std::int64_t blocks, key_bytes, codes_at;
};

// Of blocks larger than a tile: statistics of every kMaxPieceElems values.
template <class Scheme>
struct BlockMeasure {
  static constexpr int kThreads = kBlockTileThreads;

  TensorTable tensors;
  Tiling tiling;
  Scheme scheme;
  BlockStats* pieces;  // kTilePieces a tile

  using Shared = PartMemory;

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared& shared) const {
    const Tile tile = tiling.tile(block.number());
    const TensorEntry tensor = tensors.entries[tile.tensor];
    typename Block::template PerThread<LaneValues> values;
    block.each_in_warp([&](int t) { values[t] = load_lane(tensor, tile, t); });
    measure_parts(block, values, scheme.scale(), kMaxPieceElems, shared);
    block.each([&](int t) {
      if (t < kTilePieces) pieces[block.number() * kTilePieces + t] = stats_of_part(shared, t, scheme.scale());
    });
  }
};

// Their grids. Squares are added piece after piece, as the specification has it.
template <class Scheme>
struct BlockGrids {
  static constexpr int kThreads = 256;

  TensorTable tensors;
  Tiling tiling;    // of blocks, one a tile
  Tiling measured;  // that of BlockMeasure
  Scheme scheme;
  const BlockStats* pieces;
  BlockGrid* grids;

  struct Shared {
    double squares[kThreads];
    std::uint32_t magnitude, low, high;
  };

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared& shared) const {
    const Tile tile = tiling.tile(block.number());
    const TensorEntry tensor = tensors.entries[tile.tensor];
    const BlockShape<Scheme> shape(scheme, tensor.elems);
    const std::int64_t elems = shape.elems_of(tile.number, tensor.elems);
    const std::int64_t count = (elems + kMaxPieceElems - 1) / kMaxPieceElems;
    const BlockStats* const of_block =
        pieces + measured.first_tile[tile.tensor] * kTilePieces + tile.number * (shape.block_elems / kMaxPieceElems);
    const bool is_square = scheme.scale() == BlockScale::kRms || scheme.scale() == BlockScale::kL2;
    block.each([&](int t) {
      if (t > 0) return;
      shared.magnitude = 0;
      shared.low = ~ordered_bits(0);
      shared.high = ordered_bits(0);
    });
    typename Block::template PerThread<double> squares;
    block.each([&](int t) {
      squares[t] = 0;
      BlockStats stats;
      for (std::int64_t i = t; i < count; i += kThreads) stats = joined(stats, of_block[i]);
      block.raise(&shared.magnitude, stats.max_magnitude);
      block.raise(&shared.low, ~ordered_bits(stats.low));
      block.raise(&shared.high, ordered_bits(stats.high));
    });
    for (std::int64_t first = 0; is_square && first < count; first += kThreads) {
      block.each([&](int t) { shared.squares[t] = first + t < count ? of_block[first + t].squares : 0; });
      block.each([&](int t) {
        if (t > 0) return;
        const std::int64_t end = count - first < kThreads ? count - first : kThreads;
        for (std::int64_t i = 0; i < end; ++i) squares[t] += shared.squares[i];
      });
    }
    block.each([&](int t) {
      if (t > 0) return;
      BlockStats stats;
      stats.max_magnitude = shared.magnitude;
      stats.low = from_ordered_bits(~shared.low);
      stats.high = from_ordered_bits(shared.high);
      stats.squares = squares[t];
      const BlockGrid grid = scheme.grid(stats, elems, largest_finite(tensor.dtype));
      grids[block.number()] = grid;
      scheme.put(grid, tensor.payload + shape.key_bytes + tile.number * Scheme::kSideBytes);
    });
  }
};

template <class Scheme>
struct BlockEncode {
  static constexpr int kThreads = kBlockTileThreads;

  TensorTable tensors;
  Tiling tiling;
  Tiling large_blocks;  // that of BlockGrids
  Scheme scheme;
  const BlockGrid* grids;  // of large blocks

  struct Shared {
    PackedMemory packed;
    PartMemory parts;
    BlockGrid grids[kMostTileParts];
  };

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared& shared) const {
    const Tile tile = tiling.tile(block.number());
    const TensorEntry tensor = tensors.entries[tile.tensor];
    const BlockShape<Scheme> shape(scheme, tensor.elems);
    typename Block::template PerThread<LaneValues> values;
    block.each_in_warp([&](int t) { values[t] = load_lane(tensor, tile, t); });
    if (shape.is_large()) {
      block.each([&](int t) {
        const std::int64_t number = tile.first >> shape.log2_block_elems;
        if (t == 0) shared.grids[0] = grids[large_blocks.first_tile[tile.tensor] + number];
      });
    } else {
      choose_grids(block, shared, values, tile, tensor, shape);
    }
    PhiloxStream stream = {};
    if (scheme.is_random()) stream = tensors.stream_of(tile.tensor);
    block.each([&](int t) {
      if (scheme.carries_key() && tile.first == 0 && t == 0) {
        store_bytes(RandomKey{stream.key, stream.step}, tensor.payload);
      }
      PhiloxBlock random = {};
      if (scheme.is_random()) random = random_of_lane(stream, tile.first, t);
      const std::int64_t first = first_of_thread(t);
      std::uint8_t codes[kBlockRows];
      const auto put_code = [&](const BlockGrid& grid, int row) {
        codes[row] = static_cast<std::uint8_t>(scheme.code_of(grid, values[t].rows[row], random_byte(random, row)));
      };
      if (shape.has_one_a_thread()) {
        const BlockGrid grid = shared.grids[shape.is_large() ? 0 : first >> shape.log2_block_elems];
        for (int row = 0; row < kBlockRows; ++row) put_code(grid, row);
      } else {
        for (int row = 0; row < kBlockRows; ++row) {
          put_code(shared.grids[(first + row * kBlockLanes) >> shape.log2_block_elems], row);
        }
      }
      with_bits(scheme.bits(), [&](auto bits) { pack_lane(codes, tile.elems, bits, t, shared.packed); });
    });
    if (tile.elems % kDeviceGroupElems != 0) {
      block.each([&](int t) { pack_tail(tile.elems, scheme.bits(), t, shared.packed); });
    }
    block.each([&](int t) {
      copy_share(shared.packed.bytes, packed_tile_bytes(tile.elems, scheme.bits()),
                 tensor.payload + shape.codes_at + tile.first * scheme.bits() / 8, t, kThreads);
    });
  }

 private:
  // Of the blocks of the tile, which has whole ones.
  template <class Block>
  CORTADO_HD void choose_grids(Block& block, Shared& shared, typename Block::template PerThread<LaneValues>& values,
                               const Tile& tile, const TensorEntry& tensor, const BlockShape<Scheme>& shape) const {
    const std::int64_t whole = scheme.block_elems() < kBlockTileElems ? scheme.block_elems() : kBlockTileElems;
    const auto part_elems = static_cast<int>(whole < kMaxPieceElems ? whole : kMaxPieceElems);
    const int parts = static_cast<int>(whole) >> trailing_zeros(static_cast<std::uint64_t>(part_elems));  // of a block
    measure_parts(block, values, scheme.scale(), part_elems, shared.parts);
    block.each([&](int t) {
      if (t * whole >= tile.elems) return;
      BlockStats stats;
      for (int part = t * parts; part < (t + 1) * parts; ++part) {
        stats = joined(stats, stats_of_part(shared.parts, part, scheme.scale()));
      }
      const std::int64_t number = (tile.first >> shape.log2_block_elems) + t;
      const BlockGrid grid = scheme.grid(stats, shape.elems_of(number, tensor.elems), largest_finite(tensor.dtype));
      shared.grids[t] = grid;
      scheme.put(grid, tensor.payload + shape.key_bytes + number * Scheme::kSideBytes);
    });
  }
};

template <class Scheme>
struct BlockDecode {
  static constexpr int kThreads = kBlockTileThreads;

  TensorTable tensors;
  Tiling tiling;
  Scheme scheme;

  struct Shared {
    PackedMemory packed;
    BlockGrid grids[kMostTileParts];
  };

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared& shared) const {
    const Tile tile = tiling.tile(block.number());
    const TensorEntry tensor = tensors.entries[tile.tensor];
    const BlockShape<Scheme> shape(scheme, tensor.elems);
    const int bits = scheme.bits();
    const std::int64_t bytes = packed_tile_bytes(tile.elems, bits);
    const std::int64_t first_block = tile.first >> shape.log2_block_elems;
    const std::int64_t blocks = ((tile.first + tile.elems - 1) >> shape.log2_block_elems) - first_block + 1;
    block.each([&](int t) {
      copy_share(tensor.payload + shape.codes_at + tile.first * bits / 8, bytes, shared.packed.bytes, t, kThreads);
      if (t >= blocks) return;
      BlockGrid grid;
      const std::byte* const side = tensor.payload + shape.key_bytes + (first_block + t) * Scheme::kSideBytes;
      if (!scheme.take(side, largest_finite(tensor.dtype), &grid)) {
        block.set_bits(&tensors.faults[tile.tensor], kCorruptPayload);
      }
      shared.grids[t] = grid;
    });
    const std::int64_t tail = tile.elems % kDeviceGroupElems;
    if (tail != 0) {
      block.each([&](int t) {
        unpack_tail(tile.elems, bits, t, shared.packed);
        const std::int64_t used_bits = tail * bits % 8;
        if (t == 0 && used_bits != 0 && (shared.packed.bytes[bytes - 1] >> used_bits) != std::byte{0}) {
          block.set_bits(&tensors.faults[tile.tensor], kCorruptPayload);
        }
      });
    }
    PhiloxStream stream = {};
    if (scheme.carries_key()) {
      const auto key = load_bytes<RandomKey>(tensor.payload);
      stream = {key.key, key.step};
    }
    block.each([&](int t) {
      std::uint8_t codes[kBlockRows];
      with_bits(bits, [&](auto width) { unpack_lane(shared.packed, tile.elems, width, t, codes); });
      PhiloxBlock random = {};
      if (scheme.carries_key()) random = random_of_lane(stream, tile.first, t);
      const std::int64_t rows = rows_of_thread(tile.elems, t), first = tile.first + first_of_thread(t);
      bool is_legal = true;
      float values[kBlockRows] = {};
      const auto take_code = [&](const BlockGrid& grid, int row) {
        is_legal = is_legal && scheme.is_legal(codes[row]);
        values[row] = scheme.value_of(grid, codes[row], random_byte(random, row));
      };
      if (shape.has_one_a_thread() && rows >= kBlockRows) {
        const BlockGrid grid = shared.grids[(first >> shape.log2_block_elems) - first_block];
        for (int row = 0; row < kBlockRows; ++row) take_code(grid, row);
      } else {
        for (int row = 0; row < kBlockRows; ++row) {
          if (row >= rows) continue;
          take_code(shared.grids[((first + row * kBlockLanes) >> shape.log2_block_elems) - first_block], row);
        }
      }
      if (!is_legal) block.set_bits(&tensors.faults[tile.tensor], kCorruptPayload);
      store_values<kBlockRows>(values, tensor.data, tensor.dtype, first, kBlockLanes, rows);
    });
  }
};

template <class Scheme>
struct BlockPlan {
  static constexpr bool kTakesCodes = false;

  template <class Device>
  void encode(Device& device, const DeviceWorkspace& w) const {
    const Tiling blocks = w.tiling(large_blocks);
    device.launch(large.tiles, BlockMeasure<Scheme>{w.tensors, w.tiling(large), scheme, w.at(pieces)});
    device.launch(large_blocks.tiles,
                  BlockGrids<Scheme>{w.tensors, blocks, w.tiling(large), scheme, w.at(pieces), w.at(grids)});
    device.launch(tiles.tiles, BlockEncode<Scheme>{w.tensors, w.tiling(tiles), blocks, scheme, w.at(grids)});
  }
  template <class Device>
  void decode(Device& device, const DeviceWorkspace& w) const {
    device.launch(tiles.tiles, BlockDecode<Scheme>{w.tensors, w.tiling(tiles), scheme});
  }

  Scheme scheme;
  TilingSlots tiles;                // of all tensors
  TilingSlots large, large_blocks;  // of those with blocks larger than a tile
  WorkspaceSlot<BlockStats> pieces;
  WorkspaceSlot<BlockGrid> grids;
};

}  // namespace cortado
