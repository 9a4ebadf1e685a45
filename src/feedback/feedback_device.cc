// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "feedback/feedback_device.h"

#include "codec/device_layout.h"

namespace cortado {

FeedbackSlots FeedbackSlots::make(DeviceLayout& layout) {
  FeedbackSlots slots;
  const std::uint64_t count = layout.tensors().size();
  slots.tiling = layout.tile(FeedbackTable::kTileElems);
  slots.tensors = layout.scratch<FeedbackTensor>(count);
  slots.flags = layout.scratch<std::uint32_t>(count);
  slots.tile_squares = layout.scratch<DifferenceSquares>(static_cast<std::uint64_t>(slots.tiling.tiles));
  slots.squares = layout.scratch<DifferenceSquares>(count);
  return slots;
}

}  // namespace cortado
