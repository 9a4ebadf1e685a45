// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// `randk` on a device: every kept value finds its position by itself.
#pragma once

#include <bit>

#include "codec/device_workspace.h"
#include "codec/randk/randk_runs.h"

namespace cortado {

constexpr std::int64_t kRandkKeyBytes = sizeof(PhiloxStream);

// A product of NaN is the NaN made quiet, as on a CPU; a GPU has one NaN for all.
CORTADO_HD inline float scaled(float value, float factor) {
  return value != value ? std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) | 0x00400000u) : value * factor;
}

// Elements to values of the payload, or back.
struct RandkMove {
  static constexpr int kThreads = 256;
  static constexpr std::int64_t kTileElems = 1024;

  TensorTable tensors;
  Tiling tiling;  // of kept values
  const RandkRuns* runs;
  bool is_unbiased, encodes;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const Tile tile = tiling.tile(block.number());
    const TensorEntry tensor = tensors.entries[tile.tensor];
    const RandkRuns& pattern = runs[tile.tensor];
    PhiloxStream stream;
    if (encodes) {
      stream = tensors.stream_of(tile.tensor);
    } else {
      stream = load_bytes<PhiloxStream>(tensor.payload);
    }
    const std::int64_t turn = pattern.turn(stream);
    const auto factor = static_cast<float>(static_cast<double>(pattern.elems) / static_cast<double>(pattern.kept()));
    block.each([&](int t) {
      if (encodes && tile.first == 0 && t == 0) store_bytes(stream, tensor.payload);
      for (std::int64_t i = tile.first + t; i < tile.first + tile.elems; i += kThreads) {
        const std::int64_t begin = pattern.begin_of(stream, turn, i / pattern.run_elems);
        const std::int64_t at = begin + i % pattern.run_elems;
        const std::int64_t position = at < tensor.elems ? at : at - tensor.elems;
        std::byte* const bytes = tensor.payload + kRandkKeyBytes + 4 * i;
        if (encodes) {
          const float value = load_value(tensor.data, tensor.dtype, position);
          store_bytes(is_unbiased ? scaled(value, factor) : value, bytes);
        } else {
          store_value(load_bytes<float>(bytes), tensor.data, tensor.dtype, position);
        }
      }
    });
  }
};

// Encoding: whether something is not finite, which the first value then says. Decoding: zeros.
struct RandkSweep {
  static constexpr int kThreads = 256;
  static constexpr std::int64_t kTileElems = 8192;

  TensorTable tensors;
  Tiling tiling;
  std::uint32_t* not_finite;  // of a tensor; 0 before
  bool encodes;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const Tile tile = tiling.tile(block.number());
    const TensorEntry tensor = tensors.entries[tile.tensor];
    block.each([&](int t) {
      bool is_finite = true;
      for (std::int64_t i = tile.first + t; i < tile.first + tile.elems; i += kThreads) {
        if (encodes) {
          const float value = load_value(tensor.data, tensor.dtype, i);
          is_finite = is_finite && (std::bit_cast<std::uint32_t>(value) & 0x7f800000u) != 0x7f800000u;
        } else {
          store_value(0, tensor.data, tensor.dtype, i);
        }
      }
      if (!is_finite) block.set_bits(&not_finite[tile.tensor], 1u);
    });
  }
};

struct RandkMark {
  static constexpr int kThreads = 256;

  TensorTable tensors;
  std::int64_t count;
  const std::uint32_t* not_finite;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    block.each([&](int t) {
      const std::int64_t i = block.number() * kThreads + t;
      if (i >= count || not_finite[i] == 0) return;
      store_bytes(0x7fc00000u, tensors.entries[i].payload + kRandkKeyBytes);
    });
  }
};

struct RandkPlan {
  static constexpr bool kTakesCodes = false;
  static Result<RandkPlan> make(const ParameterValues& values, DeviceLayout& layout);

  template <class Device>
  void encode(Device& device, const DeviceWorkspace& w) const {
    std::uint32_t* const marks = w.at(not_finite);
    device.fill(marks, 0, static_cast<std::uint64_t>(w.tensor_count) * sizeof(std::uint32_t));
    device.launch(tiles.tiles, RandkSweep{w.tensors, w.tiling(tiles), marks, true});
    device.launch(kept.tiles, RandkMove{w.tensors, w.tiling(kept), w.at(runs), is_unbiased, true});
    device.launch((w.tensor_count + RandkMark::kThreads - 1) / RandkMark::kThreads,
                  RandkMark{w.tensors, w.tensor_count, marks});
  }
  template <class Device>
  void decode(Device& device, const DeviceWorkspace& w) const {
    device.launch(tiles.tiles, RandkSweep{w.tensors, w.tiling(tiles), w.at(not_finite), false});
    device.launch(kept.tiles, RandkMove{w.tensors, w.tiling(kept), w.at(runs), is_unbiased, false});
  }

  bool is_unbiased = false;
  TilingSlots tiles, kept;
  WorkspaceSlot<RandkRuns> runs;
  WorkspaceSlot<std::uint32_t> not_finite;
};

}  // namespace cortado
