// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/device_layout.h"

namespace cortado {

DeviceLayout::DeviceLayout(const Codec& codec, std::span<const DeviceTensor> tensors) : codec_(codec) {
  const bool is_fixed = codec.row().traits.fixed_size;
  std::vector<std::uint64_t> payload_bytes;
  for (const DeviceTensor& tensor : tensors) {
    TensorEntry entry = {};
    entry.rows = tensor.rows, entry.cols = tensor.cols, entry.elems = tensor.rows * tensor.cols;
    entry.max_payload_bytes = codec.max_payload_bytes(tensor.rows, tensor.cols, tensor.dtype);
    entry.dtype = tensor.dtype;
    entries_.push_back(entry);
    payload_bytes.push_back(is_fixed ? entry.max_payload_bytes : 0);
  }
  entry_slot_ = table<TensorEntry>(entries_);
  payload_bytes_ = table<std::uint64_t>(payload_bytes);
  faults_ = table<std::uint32_t>(std::vector<std::uint32_t>(tensors.size()));
}

std::vector<std::int64_t> DeviceLayout::elems() const {
  std::vector<std::int64_t> elems;
  for (const TensorEntry& entry : entries_) elems.push_back(entry.elems);
  return elems;
}

std::uint64_t DeviceLayout::grow(std::uint64_t* bytes, std::uint64_t more) {
  const std::uint64_t offset = *bytes;
  *bytes += (more + kWorkspaceAlignBytes - 1) / kWorkspaceAlignBytes * kWorkspaceAlignBytes;
  return offset;
}

TilingSlots DeviceLayout::tile(std::span<const std::int64_t> elems, std::int64_t tile_elems) {
  std::vector<std::int32_t> tensor_of_tile;
  std::vector<std::int64_t> first_tile;
  for (std::size_t i = 0; i < elems.size(); ++i) {
    first_tile.push_back(static_cast<std::int64_t>(tensor_of_tile.size()));
    const std::int64_t tiles = (elems[i] + tile_elems - 1) / tile_elems;
    tensor_of_tile.insert(tensor_of_tile.end(), static_cast<std::size_t>(tiles), static_cast<std::int32_t>(i));
  }
  const auto tiles = static_cast<std::int64_t>(tensor_of_tile.size());
  return {table<std::int32_t>(tensor_of_tile), table<std::int64_t>(first_tile), table<std::int64_t>(elems), tiles,
          tile_elems};
}

void DeviceLayout::bind(std::span<const DeviceTensor> tensors, const DeviceKeys& keys) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    entries_[i].data = tensors[i].data;
    entries_[i].payload = tensors[i].payload;
    entries_[i].seed = keys.seed;
    entries_[i].number = tensors[i].number;
    entries_[i].key = philox_key(keys.seed, tensors[i].number);
  }
  if (!entries_.empty()) {
    std::memcpy(tables_.data() + entry_slot_.offset, entries_.data(), entries_.size() * sizeof(TensorEntry));
  }
}

DeviceWorkspace DeviceLayout::workspace(std::byte* memory, const std::uint64_t* step) const {
  DeviceWorkspace workspace = {
      .tables = memory,
      .scratch = memory + table_bytes_,
      .tensors = {.entries = nullptr, .payload_bytes = nullptr, .faults = nullptr, .step = step},
      .tensor_count = static_cast<std::int64_t>(entries_.size())};
  workspace.tensors.entries = workspace.at(entry_slot_);
  workspace.tensors.payload_bytes = workspace.at(payload_bytes_);
  workspace.tensors.faults = workspace.at(faults_);
  return workspace;
}

}  // namespace cortado
