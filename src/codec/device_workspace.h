// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The device memory of a batch as its launches see it: tables that were uploaded, and scratch memory. Where things lie
// in it is a DeviceLayout's to say (device_layout.h), before there is any memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/device_tensors.h"

namespace cortado {

// What plans are made from and of, without the headers.
class DeviceLayout;
class ParameterValues;
template <typename T>
class Result;

// A place in a workspace for some T.
template <typename T>
struct WorkspaceSlot {
  std::uint64_t offset = 0;
  bool is_scratch = false;
};

struct TilingSlots {
  WorkspaceSlot<std::int32_t> tensor_of_tile;
  WorkspaceSlot<std::int64_t> first_tile;
  WorkspaceSlot<std::int64_t> tensor_elems;
  std::int64_t tiles = 0;
  std::int64_t tile_elems = 1;
};

struct DeviceWorkspace {
  std::byte* tables;
  std::byte* scratch;
  TensorTable tensors;
  std::int64_t tensor_count;

  template <typename T>
  T* at(WorkspaceSlot<T> slot) const {
    return reinterpret_cast<T*>((slot.is_scratch ? scratch : tables) + slot.offset);
  }
  Tiling tiling(const TilingSlots& slots) const {
    return {at(slots.tensor_of_tile), at(slots.first_tile), at(slots.tensor_elems), slots.tiles, slots.tile_elems};
  }
};

}  // namespace cortado
