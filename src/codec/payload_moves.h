// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Payloads whose sizes vary, each with room for its largest one, are put close together, so that one copy takes all of
// them over the bus; and back to their room again.
#pragma once

#include "codec/device_tensors.h"

namespace cortado {

struct PayloadMove {
  std::uint64_t from = 0, to = 0;  // offsets; fastest where both are multiples of 16
  std::uint64_t bytes = 0;
};

struct MovePayloads {
  static constexpr int kThreads = 256;
  static constexpr std::int64_t kTileBytes = 32768;

  Tiling tiling;             // of the most bytes that each of one rank's payloads may have
  const PayloadMove* moves;  // of each rank's payloads, one rank after the other
  std::int64_t payloads;     // of a rank
  const std::byte* from;
  std::byte* to;

  struct Shared {};

  // A block for each tile of each rank.
  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const Tile tile = tiling.tile(block.number() % tiling.tiles);
    const PayloadMove& move = moves[block.number() / tiling.tiles * payloads + tile.tensor];
    const std::int64_t left = static_cast<std::int64_t>(move.bytes) - tile.first;
    const std::int64_t bytes = left < tile.elems ? left : tile.elems;
    if (bytes <= 0) return;
    const std::byte* const source = from + move.from + tile.first;
    std::byte* const target = to + move.to + tile.first;
    block.each([&](int t) { copy_share(source, bytes, target, t, kThreads); });
  }
};

}  // namespace cortado
