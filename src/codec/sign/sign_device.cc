// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/sign/sign_device.h"

#include <limits>

#include "codec/device_layout.h"
#include "codec/sign/sign.h"
#include "cortado/spec.h"

namespace cortado {

Result<SignPlan> SignPlan::make(const ParameterValues& values, DeviceLayout& layout) {
  SignPlan plan;
  plan.blocks = {.scale = sign_scale_named(values.word("scale")),
                 .block_elems = values.text("block") == "tensor" ? std::numeric_limits<std::int64_t>::max()
                                                                 : values.integer("block")};
  std::vector<std::int64_t> parts, blocks;
  bool has_scales = false;  // of several parts
  for (const std::int64_t elems : layout.elems()) {
    parts.push_back(plan.blocks.parts(elems));
    const bool is_split = elems > 0 && plan.blocks.parts_of_block(elems) > 1;
    blocks.push_back(elems == 0 ? 0 : plan.blocks.blocks(elems));
    has_scales |= is_split;
  }
  if (!has_scales) blocks.assign(blocks.size(), 0);
  plan.parts = layout.tile(parts, SignParts::kTileParts);
  plan.scales = layout.tile(blocks, 1);
  plan.tiles = layout.tile(SignDecode::kTileElems);
  plan.sums = layout.scratch<SignPartSums>(static_cast<std::uint64_t>(plan.parts.tiles * SignParts::kTileParts));
  return plan;
}

}  // namespace cortado
