// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// `sign` on a device. Sixteen threads take a part of a block (sign_levels.h), a lane each: its sums are then those of
// the specification, in its order. What parts add up to becomes a scale in a second launch.
#pragma once

#include "codec/device_workspace.h"
#include "codec/sign/sign_levels.h"

namespace cortado {

struct SignBlocks {
  SignScale scale;
  std::int64_t block_elems;  // at most 2^62

  CORTADO_HD std::int64_t elems_of_block(std::int64_t elems) const { return block_elems < elems ? block_elems : elems; }
  CORTADO_HD std::int64_t parts_of_block(std::int64_t elems) const {
    return (elems_of_block(elems) + kSignPartElems - 1) / kSignPartElems;
  }
  CORTADO_HD std::int64_t blocks(std::int64_t elems) const { return sign_blocks(elems, elems_of_block(elems)); }
  // The last block has as many slots for parts as the others.
  CORTADO_HD std::int64_t parts(std::int64_t elems) const {
    return elems == 0 ? 0 : blocks(elems) * parts_of_block(elems);
  }
  CORTADO_HD std::int64_t scale_bytes(std::int64_t elems) const { return blocks(elems) * sign_scale_bytes(scale); }
};

struct SignPartSums {
  double positive, negative;  // of magnitudes, all of them positive; of two means, of values
  std::int64_t negatives;
};

// A warp takes two parts, in rows of 16 values.
struct SignParts {
  static constexpr int kThreads = 256, kLanes = 16;
  static constexpr std::int64_t kTileParts = kThreads / kLanes;
  static constexpr int kRows = kSignPartElems / kLanes;
  static constexpr int kRowsAtOnce = 8;  // read before they are added, so that many reads are under way

  TensorTable tensors;
  Tiling tiling;  // of parts
  SignBlocks blocks;
  SignPartSums* sums;  // of all tensors' parts, in the order of tiles

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const Tile tile = tiling.tile(block.number());
    const TensorEntry tensor = tensors.entries[tile.tensor];
    const std::int64_t block_elems = blocks.elems_of_block(tensor.elems);
    const std::int64_t parts_a_block = blocks.parts_of_block(tensor.elems);
    const bool two = blocks.scale == SignScale::kTwoMeans;
    std::byte* const bits = tensor.payload + blocks.scale_bytes(tensor.elems);
    typename Block::template PerThread<SignPartSums> own;
    typename Block::template PerThread<std::int64_t> first, elems;  // of the thread's part
    block.each_in_warp([&](int t) {
      const std::int64_t part = tile.first + t / kLanes;
      const std::int64_t offset = part % parts_a_block * kSignPartElems;
      first[t] = part / parts_a_block * block_elems + offset;
      elems[t] = 0;
      if (t / kLanes < tile.elems) {
        const std::int64_t in_block = block_elems - offset, in_tensor = tensor.elems - first[t];
        const std::int64_t left = in_block < in_tensor ? in_block : in_tensor;
        elems[t] = left < kSignPartElems ? (left < 0 ? 0 : left) : kSignPartElems;
      }
      own[t] = {0, 0, 0};
    });
    for (int row = 0; row < kRows; row += kRowsAtOnce) {
      typename Block::template PerThread<std::uint32_t> signs, ballot, row_signs;
      block.each_in_warp([&](int t) {
        float values[kRowsAtOnce];
        const std::int64_t i = std::int64_t{row} * kLanes + t % kLanes;
        load_values<kRowsAtOnce>(tensor.data, tensor.dtype, first[t] + i, kLanes, (elems[t] - i + kLanes - 1) / kLanes,
                                 values);
        SignPartSums& sum = own[t];
        signs[t] = 0;
        for (int r = 0; r < kRowsAtOnce; ++r) {
          const bool is_negative = values[r] < 0;
          if (!two) {
            sum.positive += static_cast<double>(fabsf(values[r]));
          } else if (is_negative) {
            sum.negative += static_cast<double>(values[r]);
          } else {
            sum.positive += static_cast<double>(values[r]);
          }
          sum.negatives += is_negative ? 1 : 0;
          signs[t] |= static_cast<std::uint32_t>(is_negative) << r;
        }
      });
      // Bit r of 16 threads becomes two bytes.
      for (int r = 0; r < kRowsAtOnce; ++r) {
        block.each_in_warp([&](int t) { ballot[t] = signs[t] >> r & 1; });
        block.ballot(ballot);
        block.each_in_warp([&](int t) {
          if (t % kLanes == r) row_signs[t] = ballot[t] >> t % kWarpThreads / kLanes * kLanes & 0xffff;
        });
      }
      block.each_in_warp([&](int t) {
        if (t % kLanes < kRowsAtOnce) put_row(bits, first[t], elems[t], row + t % kLanes, row_signs[t]);
      });
    }
    block.butterfly(own, kLanes, [](const SignPartSums& a, const SignPartSums& b) {
      return SignPartSums{a.positive + b.positive, a.negative + b.negative, a.negatives + b.negatives};
    });
    block.each_in_warp([&](int t) {
      const std::int64_t part = tile.first + t / kLanes;
      if (t % kLanes != 0 || t / kLanes >= tile.elems) return;
      sums[block.number() * kTileParts + t / kLanes] = own[t];
      if (parts_a_block == 1) put_scale(tensor, part, own[t], elems[t]);
    });
  }

  // Two bytes, or what there is of them.
  CORTADO_HD static void put_row(std::byte* bits, std::int64_t first, std::int64_t elems, int row,
                                 std::uint32_t signs) {
    const std::int64_t left = elems - std::int64_t{row} * kLanes;
    std::byte* const to = bits + (first + std::int64_t{row} * kLanes) / 8;
    if (left > 8 && is_aligned(to, 2)) {
      *reinterpret_cast<std::uint16_t*>(to) = static_cast<std::uint16_t>(signs);
      return;
    }
    if (left > 0) to[0] = static_cast<std::byte>(signs & 0xff);
    if (left > 8) to[1] = static_cast<std::byte>(signs >> 8);
  }

  CORTADO_HD void put_scale(const TensorEntry& tensor, std::int64_t number, const SignPartSums& sum,
                            std::int64_t elems) const {
    put_sign_scale(blocks.scale, sum, elems, tensor.payload + number * sign_scale_bytes(blocks.scale));
  }
  CORTADO_HD static void put_sign_scale(SignScale scale, const SignPartSums& sum, std::int64_t elems, std::byte* to) {
    const bool two = scale == SignScale::kTwoMeans;
    float mean = sign_mean(sum.positive, two ? elems - sum.negatives : elems);
    if (scale == SignScale::kNone) mean = sign_of_mean(mean);
    store_bytes(mean, to);
    if (two) store_bytes(sign_mean(sum.negative, sum.negatives), to + sizeof(float));
  }
};

// A scale each, of blocks of several parts.
struct SignScales {
  static constexpr int kThreads = kSignSums;

  TensorTable tensors;
  Tiling tiling;  // of scale blocks, one a tile
  Tiling parts;   // that of SignParts
  SignBlocks blocks;
  const SignPartSums* sums;

  struct Shared {
    SignPartSums sums[kThreads];
  };

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared& shared) const {
    const Tile tile = tiling.tile(block.number());
    const TensorEntry tensor = tensors.entries[tile.tensor];
    const std::int64_t parts_a_block = blocks.parts_of_block(tensor.elems);
    if (parts_a_block == 1) return;
    const std::int64_t block_elems = blocks.elems_of_block(tensor.elems);
    const std::int64_t left = tensor.elems - tile.first * block_elems;
    const std::int64_t elems = left < block_elems ? left : block_elems;
    const SignPartSums* of_block =
        sums + parts.first_tile[tile.tensor] * SignParts::kTileParts + tile.first * parts_a_block;
    block.each([&](int t) {
      SignPartSums sum = {0, 0, 0};
      for (std::int64_t part = t; part < (elems + kSignPartElems - 1) / kSignPartElems; part += kThreads) {
        sum.positive += of_block[part].positive;
        sum.negative += of_block[part].negative;
        sum.negatives += of_block[part].negatives;
      }
      shared.sums[t] = sum;
    });
    for (int half = kThreads / 2; half > 0; half /= 2) {
      block.each([&](int t) {
        if (t >= half) return;
        shared.sums[t].positive += shared.sums[t + half].positive;
        shared.sums[t].negative += shared.sums[t + half].negative;
        shared.sums[t].negatives += shared.sums[t + half].negatives;
      });
    }
    block.each([&](int t) {
      if (t > 0) return;
      SignParts::put_sign_scale(blocks.scale, shared.sums[0], elems,
                                tensor.payload + tile.first * sign_scale_bytes(blocks.scale));
    });
  }
};

struct SignDecode {
  static constexpr int kThreads = 256, kRows = 16;
  static constexpr std::int64_t kTileElems = kThreads * kRows;

  TensorTable tensors;
  Tiling tiling;
  SignBlocks blocks;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const Tile tile = tiling.tile(block.number());
    const TensorEntry tensor = tensors.entries[tile.tensor];
    const std::int64_t block_elems = blocks.elems_of_block(tensor.elems);
    const std::int64_t first_block = block_elems == tensor.elems ? 0 : tile.first / block_elems;
    const std::int64_t before = tile.first - first_block * block_elems;  // values of that block in other tiles
    const bool is_one = before + tile.elems <= block_elems;
    const auto short_block = static_cast<std::uint32_t>(block_elems);  // at most 2^24, unless there is one block only
    const std::byte* const bits = tensor.payload + blocks.scale_bytes(tensor.elems);
    const auto levels_of = [&](std::int64_t number) {
      const SignLevels levels = read_sign_levels(tensor.payload, number, blocks.scale);
      if (!is_sign_scale(levels, blocks.scale)) block.set_bits(&tensors.faults[tile.tensor], kCorruptPayload);
      return levels;
    };
    block.each([&](int t) {
      if (t >= tile.elems) return;
      const std::int64_t first = tile.first + t, rows = (tile.elems - t + kThreads - 1) / kThreads;
      // Eight threads share a byte, and go on to others by whole numbers of them.
      std::byte bytes[kRows];
      load_rows<kRows>(bits + first / 8, kThreads / 8, rows, bytes);
      SignLevels levels = levels_of(first_block + (is_one ? 0 : static_cast<std::uint32_t>(before + t) / short_block));
      float values[kRows] = {};
      for (int row = 0; row < kRows; ++row) {
        if (row >= rows) continue;
        if (!is_one && row > 0) {
          levels = levels_of(first_block + static_cast<std::uint32_t>(before + t + row * kThreads) / short_block);
        }
        const bool is_negative = (bytes[row] >> (first % 8) & std::byte{1}) != std::byte{0};
        values[row] = is_negative ? levels.negative : levels.positive;
      }
      store_values<kRows>(values, tensor.data, tensor.dtype, first, kThreads, rows);
    });
    block.each([&](int t) {
      const std::int64_t last = tensor.elems - 1;  // behind it are no signs
      if (t != 0 || last >= tile.first + tile.elems || last % 8 == 7) return;
      if ((bits[last / 8] >> (last % 8 + 1)) != std::byte{0}) {
        block.set_bits(&tensors.faults[tile.tensor], kCorruptPayload);
      }
    });
  }
};

struct SignPlan {
  static constexpr bool kTakesCodes = false;
  static Result<SignPlan> make(const ParameterValues& values, DeviceLayout& layout);

  template <class Device>
  void encode(Device& device, const DeviceWorkspace& w) const {
    device.launch(parts.tiles, SignParts{w.tensors, w.tiling(parts), blocks, w.at(sums)});
    device.launch(scales.tiles, SignScales{w.tensors, w.tiling(scales), w.tiling(parts), blocks, w.at(sums)});
  }
  template <class Device>
  void decode(Device& device, const DeviceWorkspace& w) const {
    device.launch(tiles.tiles, SignDecode{w.tensors, w.tiling(tiles), blocks});
  }

  SignBlocks blocks;
  TilingSlots parts, scales, tiles;
  WorkspaceSlot<SignPartSums> sums;
};

}  // namespace cortado
