// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// `float_rans` on a device: values are split into codes and rest, or merged from them, around the kernels of `rans`.
#pragma once

#include "codec/rans/rans_device.h"

namespace cortado {

// A float, rotated left by one bit: its upper byte is the code.
struct FloatSplit {
  static constexpr int kThreads = 256;
  static constexpr std::int64_t kTileElems = 4096;

  TensorTable tensors;
  Tiling tiling;
  const RansMessage* messages;
  bool splits;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const Tile tile = tiling.tile(block.number());
    const TensorEntry tensor = tensors.entries[tile.tensor];
    std::uint8_t* const codes = messages[tile.tensor].codes;
    std::byte* const rest = tensor.payload;
    const bool is_broken = !splits && (tensors.faults[tile.tensor] & kCorruptPayload) != 0;
    if (is_broken) return;
    block.each([&](int t) {
      for (std::int64_t i = tile.first + t; i < tile.first + tile.elems; i += kThreads) {
        if (tensor.dtype == DType::kFloat32) {
          std::byte* const lower = rest + 2 * i;
          std::byte* const middle = rest + 2 * tensor.elems + i;
          auto& value = static_cast<std::uint32_t*>(tensor.data)[i];
          if (splits) {
            const std::uint32_t rotated = std::rotl(value, 1);
            store_half(static_cast<std::uint16_t>(rotated), lower);
            *middle = static_cast<std::byte>(rotated >> 16);
            codes[i] = static_cast<std::uint8_t>(rotated >> 24);
          } else {
            value = std::rotr(
                load_half(lower) | std::to_integer<std::uint32_t>(*middle) << 16 | std::uint32_t{codes[i]} << 24, 1);
          }
        } else {
          auto& value = static_cast<std::uint16_t*>(tensor.data)[i];
          if (splits) {
            const std::uint16_t rotated = std::rotl(value, 1);
            rest[i] = static_cast<std::byte>(rotated);
            codes[i] = static_cast<std::uint8_t>(rotated >> 8);
          } else {
            const auto rotated = static_cast<std::uint16_t>(std::to_integer<std::uint32_t>(rest[i]) | codes[i] << 8);
            value = std::rotr(rotated, 1);
          }
        }
      }
    });
  }

 private:
  CORTADO_HD static void store_half(std::uint16_t value, std::byte* to) {
    if (is_aligned(to, 2)) {
      *reinterpret_cast<std::uint16_t*>(to) = value;
    } else {
      store_bytes(value, to);
    }
  }
  CORTADO_HD static std::uint32_t load_half(const std::byte* from) {
    return is_aligned(from, 2) ? *reinterpret_cast<const std::uint16_t*>(from) : load_bytes<std::uint16_t>(from);
  }
};

struct FloatRansPlan {
  static constexpr bool kTakesCodes = false;
  static Result<FloatRansPlan> make(const ParameterValues& values, DeviceLayout& layout);

  template <class Device>
  void encode(Device& device, const DeviceWorkspace& w) const {
    rans.begin(device, w, w.at(codes), true);
    device.launch(tiles.tiles, FloatSplit{w.tensors, w.tiling(tiles), w.at(rans.places.messages), true});
    rans.encode_messages(device, w, false);
  }
  template <class Device>
  void decode(Device& device, const DeviceWorkspace& w) const {
    rans.begin(device, w, w.at(codes), false);
    rans.places.decode(device, w, w.tiling(rans.blocks));
    device.launch(tiles.tiles, FloatSplit{w.tensors, w.tiling(tiles), w.at(rans.places.messages), false});
  }

  RansPlan rans;
  TilingSlots tiles;
  WorkspaceSlot<std::uint8_t> codes;
};

}  // namespace cortado
