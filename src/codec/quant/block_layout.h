// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "codec/device_layout.h"
#include "codec/quant/block_device.h"

namespace cortado {

template <class Plan, class Scheme>
Plan make_block_plan(const Scheme& scheme, DeviceLayout& layout) {
  Plan plan{};
  plan.scheme = scheme;
  std::vector<std::int64_t> elems, blocks;
  for (const std::int64_t of_tensor : layout.elems()) {
    const bool is_large = of_tensor > 0 && BlockShape(scheme, of_tensor).is_large();
    elems.push_back(is_large ? of_tensor : 0);
    blocks.push_back(is_large ? BlockShape(scheme, of_tensor).blocks : 0);
  }
  plan.tiles = layout.tile(kBlockTileElems);
  plan.large = layout.tile(elems, kBlockTileElems);
  plan.large_blocks = layout.tile(blocks, 1);
  plan.pieces = layout.template scratch<BlockStats>(static_cast<std::uint64_t>(plan.large.tiles * kTilePieces));
  plan.grids = layout.template scratch<BlockGrid>(static_cast<std::uint64_t>(plan.large_blocks.tiles));
  return plan;
}

}  // namespace cortado
