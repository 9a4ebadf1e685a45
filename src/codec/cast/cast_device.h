// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// `cast` on a device: every thread converts eight neighbours, read and written as 16 bytes where alignment allows.
#pragma once

#include "codec/device_workspace.h"

namespace cortado {

// Between two float dtypes. One of the two is the tensor's memory, the other one its payload, of any alignment.
struct CastTile {
  static constexpr int kThreads = 256;
  static constexpr int kValues = 8;  // of a thread
  static constexpr std::int64_t kTileElems = std::int64_t{kThreads} * kValues;

  TensorTable tensors;
  Tiling tiling;
  DType narrow;
  bool encodes;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const Tile tile = tiling.tile(block.number());
    const TensorEntry tensor = tensors.entries[tile.tensor];
    const DType from = encodes ? tensor.dtype : narrow, to = encodes ? narrow : tensor.dtype;
    const auto from_bytes = static_cast<std::int64_t>(dtype_bytes(from)),
               to_bytes = static_cast<std::int64_t>(dtype_bytes(to));
    const std::byte* input = encodes ? static_cast<const std::byte*>(tensor.data) : tensor.payload;
    std::byte* output = encodes ? tensor.payload : static_cast<std::byte*>(tensor.data);
    input += tile.first * from_bytes;
    output += tile.first * to_bytes;
    block.each([&](int t) {
      // A NaN of the payload's own format keeps every bit.
      if (from == to) return copy_share(input, tile.elems * to_bytes, output, t, kThreads);
      if (from == DType::kFloat32 && to == DType::kBFloat16) return convert<Fp32, Bf16>(input, tile.elems, output, t);
      if (from == DType::kFloat32) return convert<Fp32, Fp16>(input, tile.elems, output, t);
      if (from == DType::kBFloat16 && to == DType::kFloat32) return convert<Bf16, Fp32>(input, tile.elems, output, t);
      if (from == DType::kBFloat16) return convert<Bf16, Fp16>(input, tile.elems, output, t);
      if (to == DType::kFloat32) return convert<Fp16, Fp32>(input, tile.elems, output, t);
      return convert<Fp16, Bf16>(input, tile.elems, output, t);
    });
  }

 private:
  struct Fp32 {
    using Raw = float;
    CORTADO_HD static float widen(float value) { return value; }
    CORTADO_HD static float narrow(float value) { return value; }
  };
  struct Fp16 {
    using Raw = std::uint16_t;
    CORTADO_HD static float widen(std::uint16_t bits) { return fp16_to_float(bits); }
    CORTADO_HD static std::uint16_t narrow(float value) { return float_to_fp16(value); }
  };
  struct Bf16 {
    using Raw = std::uint16_t;
    CORTADO_HD static float widen(std::uint16_t bits) { return bf16_to_float(bits); }
    CORTADO_HD static std::uint16_t narrow(float value) { return float_to_bf16(value); }
  };
  template <typename T>
  struct Eight {
    static constexpr int kParts = kValues * sizeof(T) / sizeof(Bytes16);
    T values[kValues];
  };

  template <class From, class To>
  CORTADO_HD static void convert(const std::byte* input, std::int64_t elems, std::byte* output, int t) {
    using Input = Eight<typename From::Raw>;
    using Output = Eight<typename To::Raw>;
    constexpr std::int64_t kFromBytes = sizeof(typename From::Raw), kToBytes = sizeof(typename To::Raw);
    if (is_aligned(input, 16) && is_aligned(output, 16) && elems == kTileElems) {
      Bytes16 from[Input::kParts], to[Output::kParts];
      for (int i = 0; i < Input::kParts; ++i) from[i] = reinterpret_cast<const Bytes16*>(input)[t * Input::kParts + i];
      Input wide;
      memcpy(&wide, from, sizeof(wide));
      Output narrow;
      for (int i = 0; i < kValues; ++i) narrow.values[i] = To::narrow(From::widen(wide.values[i]));
      memcpy(to, &narrow, sizeof(to));
      for (int i = 0; i < Output::kParts; ++i) reinterpret_cast<Bytes16*>(output)[t * Output::kParts + i] = to[i];
      return;
    }
    for (std::int64_t i = t; i < elems; i += kThreads) {
      const float value = From::widen(load_bytes<typename From::Raw>(input + i * kFromBytes));
      store_bytes(To::narrow(value), output + i * kToBytes);
    }
  }
};

struct CastPlan {
  static constexpr bool kTakesCodes = false;
  static Result<CastPlan> make(const ParameterValues& values, DeviceLayout& layout);

  template <class Device>
  void encode(Device& device, const DeviceWorkspace& workspace) const {
    run(device, workspace, true);
  }
  template <class Device>
  void decode(Device& device, const DeviceWorkspace& workspace) const {
    run(device, workspace, false);
  }
  template <class Device>
  void run(Device& device, const DeviceWorkspace& workspace, bool encodes) const {
    device.launch(tiling.tiles, CastTile{workspace.tensors, workspace.tiling(tiling), narrow, encodes});
  }

  DType narrow;
  TilingSlots tiling;
};

}  // namespace cortado
