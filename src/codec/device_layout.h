// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// DeviceLayout: what a batch needs of device memory, made from the shapes of its tensors alone. Tables are written
// here, on the host, and uploaded as one; scratch memory has a size only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "codec/device_batch.h"
#include "codec/device_workspace.h"

namespace cortado {

class DeviceLayout {
 public:
  DeviceLayout(const Codec& codec, std::span<const DeviceTensor> tensors);

  const Codec& codec() const { return codec_; }
  std::span<const TensorEntry> tensors() const { return entries_; }  // without pointers and keys
  std::vector<std::int64_t> elems() const;                           // of each tensor

  template <typename T>
  WorkspaceSlot<T> table(std::span<const T> values) {
    const std::uint64_t offset = grow(&table_bytes_, values.size_bytes());
    tables_.resize(table_bytes_);
    if (!values.empty()) std::memcpy(tables_.data() + offset, values.data(), values.size_bytes());
    return {offset, false};
  }
  template <typename T>
  WorkspaceSlot<T> scratch(std::uint64_t count) {
    return {grow(&scratch_bytes_, count * sizeof(T)), true};
  }

  // Tiles of all tensors; those of an empty one are none. `elems` may be another number for each tensor than that of
  // its elements.
  TilingSlots tile(std::int64_t tile_elems) { return tile(elems(), tile_elems); }
  TilingSlots tile(std::span<const std::int64_t> elems, std::int64_t tile_elems);

  std::uint64_t workspace_bytes() const { return table_bytes_ + scratch_bytes_; }

  // ---- once there is memory ----

  // Puts pointers and keys into the tables.
  void bind(std::span<const DeviceTensor> tensors, const DeviceKeys& keys);
  std::span<const std::byte> tables() const { return tables_; }
  DeviceWorkspace workspace(std::byte* memory, const std::uint64_t* step) const;

 private:
  static std::uint64_t grow(std::uint64_t* bytes, std::uint64_t more);

  const Codec& codec_;
  std::vector<TensorEntry> entries_;
  std::vector<std::byte> tables_;
  std::uint64_t table_bytes_ = 0, scratch_bytes_ = 0;
  WorkspaceSlot<TensorEntry> entry_slot_;
  WorkspaceSlot<std::uint64_t> payload_bytes_;
  WorkspaceSlot<std::uint32_t> faults_;
};

}  // namespace cortado
