// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The passes of feedback_pass.h on a device, for all tensors of a message in one launch each, and the mean of what the
// ranks have sent. Values have the bits of the passes on the CPU; of squares only the order of additions is another.
//
//   add_gradients   values += gradients, or without feedback values = gradients    what the codec encodes
//   take_decoded    for one rank after the other, in rank order: sums += decoded; the rank's own is subtracted from the
//                   values, if they are kept; with the last rank gradients = sums * mean_scale
//   sum_squares     after the last rank
//   take_back       undoes add_gradients, before gradients are overwritten
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "codec/device_workspace.h"
#include "feedback/feedback_pass.h"

namespace cortado {

// Pointers are to device memory, aligned as their types are; no two overlap.
struct FeedbackTensor {
  void* gradient = nullptr;         // `dtype`; overwritten with the mean
  void* values = nullptr;           // `encoded`; with feedback the residual
  float* velocity = nullptr;        // nullptr: no momentum correction
  float* spare = nullptr;           // of the residual before the step, to undo it to the bit; without a velocity
  const void* decoded = nullptr;    // `encoded`; of the rank that is taken
  float* sum = nullptr;             // over ranks so far
  DType dtype = DType::kFloat32;    // fp32, fp16 or bf16
  DType encoded = DType::kFloat32;  // `dtype`, or fp32; fp32 with feedback
};

// What all launches of a message share. Tables and results are in device memory.
struct FeedbackTable {
  static constexpr std::int64_t kTileElems = 4096;

  const FeedbackTensor* tensors;
  Tiling tiling;  // of kTileElems
  std::int64_t tensor_count;
  bool has_feedback;

  // Of a tensor: what is true of some element of its gradient.
  static constexpr std::uint32_t kNotFinite = 1, kHasBits = 2;
  std::uint32_t* flags;
  DifferenceSquares* tile_squares;  // scratch
  DifferenceSquares* squares;       // of a tensor
};

// Of one step; its elems, gradient and dtype count for nothing.
struct FeedbackStep {
  float gradient_scale;
  float gradient_limit;
  float momentum;
  const float* loss_scale = nullptr;  // in device memory: what the first two are made of, in place of theirs

  static FeedbackStep of(const FeedbackPass& pass) {
    return {pass.gradient_scale, pass.gradient_limit(), pass.momentum};
  }
  CORTADO_HD FeedbackStep resolved() const {
    if (loss_scale == nullptr) return *this;
    const float scale = unscale_of(*loss_scale);
    return {scale, gradient_limit_of(scale), momentum, nullptr};
  }
};

// ---- kernels -------------------------------------------------------------------------------------------------------

CORTADO_HD inline bool is_below(float value, float limit) {
  return value < limit && value > -limit;  // false for NaN
}

struct AddGradients {
  static constexpr int kThreads = 256;

  static constexpr int kWarps = kThreads / kWarpThreads;

  FeedbackTable table;
  FeedbackStep step;

  struct Shared {
    std::uint32_t of_warp[kWarps];
  };

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared& shared) const {
    const Tile tile = table.tiling.tile(block.number());
    const FeedbackTensor& tensor = table.tensors[tile.tensor];
    const FeedbackStep known = step.resolved();
    typename Block::template PerThread<std::uint32_t> flags;
    block.each_in_warp([&](int t) {
      std::uint32_t found = 0;
      for (std::int64_t i = tile.first + t; i < tile.first + tile.elems; i += kThreads) {
        found |= table.has_feedback ? add(known, tensor, i) : copy(tensor, i);
      }
      flags[t] = found;
    });
    block.butterfly(flags, kWarpThreads, [](std::uint32_t a, std::uint32_t b) { return a | b; });
    block.each([&](int t) {
      if (t % kWarpThreads == 0) shared.of_warp[t / kWarpThreads] = flags[t];
    });
    block.each([&](int t) {
      if (t != 0) return;
      std::uint32_t found = 0;
      for (const std::uint32_t of_warp : shared.of_warp) found |= of_warp;
      if (found != 0) block.set_bits(table.flags + tile.tensor, found);
    });
  }

 private:
  CORTADO_HD static std::uint32_t flags_of(bool finite, std::uint32_t bits) {
    return (finite ? 0 : FeedbackTable::kNotFinite) | (bits != 0 ? FeedbackTable::kHasBits : 0);
  }
  // Both return the flags of the element.
  CORTADO_HD static std::uint32_t add(const FeedbackStep& known, const FeedbackTensor& tensor, std::int64_t i) {
    const float gradient = load_value(tensor.gradient, tensor.dtype, i);
    const bool finite = is_below(gradient, known.gradient_limit);
    const std::uint32_t flags = flags_of(finite, std::bit_cast<std::uint32_t>(gradient));
    float* const residual = static_cast<float*>(tensor.values);
    if (tensor.spare != nullptr) tensor.spare[i] = residual[i];
    if (tensor.velocity == nullptr) {
      residual[i] += finite ? gradient * known.gradient_scale : 0.0f;
      return flags;
    }
    const float moved = known.momentum * tensor.velocity[i] + gradient * known.gradient_scale;
    residual[i] += finite ? moved : 0.0f;
    if (finite) tensor.velocity[i] = moved;
    return flags;
  }
  CORTADO_HD static std::uint32_t copy(const FeedbackTensor& tensor, std::int64_t i) {
    if (tensor.dtype == tensor.encoded && tensor.dtype != DType::kFloat32) {  // NaN keeps every bit
      const std::uint16_t bits = static_cast<const std::uint16_t*>(tensor.gradient)[i];
      static_cast<std::uint16_t*>(tensor.values)[i] = bits;
      const std::uint16_t exponent = tensor.dtype == DType::kFloat16 ? 0x7c00u : 0x7f80u;
      return flags_of((bits & exponent) != exponent, bits);
    }
    const float value = load_value(tensor.gradient, tensor.dtype, i);
    static_cast<float*>(tensor.values)[i] = value;
    const auto bits = std::bit_cast<std::uint32_t>(value);
    return flags_of((bits & 0x7f800000u) != 0x7f800000u, bits);
  }
};

struct TakeDecoded {
  static constexpr int kThreads = 256;
  static constexpr int kWarps = kThreads / kWarpThreads;

  FeedbackTable table;
  float mean_scale;
  bool is_first, is_last;  // in rank order
  bool is_own;             // and the step is finite
  bool holds_zeros;        // StepContext::holds_zero_gradients: without a gradient a tensor's residual waits

  struct Shared {
    DifferenceSquares of_warp[kWarps];
  };

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared& shared) const {
    const Tile tile = table.tiling.tile(block.number());
    const FeedbackTensor& tensor = table.tensors[tile.tensor];
    const bool is_held = holds_zeros && (table.flags[tile.tensor] & FeedbackTable::kHasBits) == 0;
    typename Block::template PerThread<DifferenceSquares> squares;
    block.each_in_warp([&](int t) {
      squares[t] = {};
      for (std::int64_t i = tile.first + t; i < tile.first + tile.elems; i += kThreads) {
        const float decoded = load_value(tensor.decoded, tensor.encoded, i);
        if (is_own && !is_held) settle(tensor, i, decoded, squares[t]);
        const float sum = is_first ? decoded : tensor.sum[i] + decoded;
        if (is_last) {
          store_value(sum * mean_scale, tensor.gradient, tensor.dtype, i);
        } else {
          tensor.sum[i] = sum;
        }
      }
    });
    if (!is_own) return;
    block.butterfly(squares, kWarpThreads, [](const DifferenceSquares& a, const DifferenceSquares& b) {
      return DifferenceSquares{a.of_values + b.of_values, a.of_differences + b.of_differences};
    });
    block.each([&](int t) {
      if (t % kWarpThreads == 0) shared.of_warp[t / kWarpThreads] = squares[t];
    });
    block.each([&](int t) {
      if (t != 0) return;
      DifferenceSquares total;
      for (const DifferenceSquares& warp : shared.of_warp) {
        total.of_values += warp.of_values;
        total.of_differences += warp.of_differences;
      }
      table.tile_squares[block.number()] = total;
    });
  }

 private:
  CORTADO_HD void settle(const FeedbackTensor& tensor, std::int64_t i, float decoded,
                         DifferenceSquares& squares) const {
    const float value = load_value(tensor.values, tensor.encoded, i);
    const float difference = value - decoded;
    squares.of_values += static_cast<double>(value) * value;  // of values above 1e18 no float holds them
    squares.of_differences += static_cast<double>(difference) * difference;
    if (!table.has_feedback) return;
    // As CodecTensor: what came as Inf, of a narrow wire, is owed no more.
    const bool finite = (std::bit_cast<std::uint32_t>(decoded) & 0x7f800000u) != 0x7f800000u;
    static_cast<float*>(tensor.values)[i] = finite ? difference : 0.0f;
    if (tensor.velocity != nullptr && decoded != 0.0f) tensor.velocity[i] = 0.0f;
  }
};

// A block for each tensor. With feedback a tensor that came with an Inf has none.
struct SumSquares {
  static constexpr int kThreads = 256;

  FeedbackTable table;

  struct Shared {
    DifferenceSquares of_thread[kThreads];
  };

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared& shared) const {
    const std::int64_t tensor = block.number();
    const std::int64_t first = table.tiling.first_tile[tensor];
    const std::int64_t tiles =
        (table.tiling.tensor_elems[tensor] + table.tiling.tile_elems - 1) / table.tiling.tile_elems;
    block.each([&](int t) {
      DifferenceSquares own;
      for (std::int64_t i = t; i < tiles; i += kThreads) {
        own.of_values += table.tile_squares[first + i].of_values;
        own.of_differences += table.tile_squares[first + i].of_differences;
      }
      shared.of_thread[t] = own;
    });
    block.each([&](int t) {
      if (t != 0) return;
      DifferenceSquares total;
      for (const DifferenceSquares& thread : shared.of_thread) {
        total.of_values += thread.of_values;
        total.of_differences += thread.of_differences;
      }
      const bool finite = total.of_differences <= std::numeric_limits<double>::max();  // false for NaN
      table.squares[tensor] = finite || !table.has_feedback ? total : DifferenceSquares{};
    });
  }
};

struct TakeBack {
  static constexpr int kThreads = 256;

  FeedbackTable table;
  FeedbackStep step;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const Tile tile = table.tiling.tile(block.number());
    const FeedbackTensor& tensor = table.tensors[tile.tensor];
    const FeedbackStep known = step.resolved();
    block.each([&](int t) {
      for (std::int64_t i = tile.first + t; i < tile.first + tile.elems; i += kThreads) take_back(known, tensor, i);
    });
  }

 private:
  CORTADO_HD static void take_back(const FeedbackStep& known, const FeedbackTensor& tensor, std::int64_t i) {
    if (tensor.spare != nullptr) {
      static_cast<float*>(tensor.values)[i] = tensor.spare[i];
      return;
    }
    const float gradient = load_value(tensor.gradient, tensor.dtype, i);
    if (!is_below(gradient, known.gradient_limit)) return;
    float added = gradient * known.gradient_scale;
    if (tensor.velocity != nullptr) {
      const float moved = tensor.velocity[i];
      tensor.velocity[i] = known.momentum > 0 ? without_rounding(moved - added, added) / known.momentum : 0.0f;
      added = moved;
    }
    float& residual = static_cast<float*>(tensor.values)[i];
    residual = without_rounding(residual - added, added);
  }
};

// ---- launches ------------------------------------------------------------------------------------------------------

// Where a table lies in a workspace. What is at `tensors` is uploaded by who uses it, whenever a pointer changes.
struct FeedbackSlots {
  // For all tensors of the layout.
  static FeedbackSlots make(DeviceLayout& layout);
  FeedbackTable table(const DeviceWorkspace& workspace, bool has_feedback) const {
    return {.tensors = workspace.at(tensors),
            .tiling = workspace.tiling(tiling),
            .tensor_count = workspace.tensor_count,
            .has_feedback = has_feedback,
            .flags = workspace.at(flags),
            .tile_squares = workspace.at(tile_squares),
            .squares = workspace.at(squares)};
  }

  TilingSlots tiling;
  WorkspaceSlot<FeedbackTensor> tensors;
  WorkspaceSlot<std::uint32_t> flags;
  WorkspaceSlot<DifferenceSquares> tile_squares, squares;
};

// Each reads and writes only what its table says, in the order of the device's stream.
struct FeedbackLaunches {
  FeedbackTable table;

  template <class Device>
  void add_gradients(Device& device, const FeedbackStep& step) const {
    device.fill(table.flags, 0, static_cast<std::uint64_t>(table.tensor_count) * sizeof(std::uint32_t));
    device.launch(table.tiling.tiles, AddGradients{table, step});
  }

  // Rank `rank` of `world_size`. is_own: it is this rank, and the step is finite. holds_zeros: as TakeDecoded's.
  template <class Device>
  void take_decoded(Device& device, int rank, int world_size, bool is_own, float mean_scale, bool holds_zeros) const {
    device.launch(table.tiling.tiles, TakeDecoded{.table = table,
                                                  .mean_scale = mean_scale,
                                                  .is_first = rank == 0,
                                                  .is_last = rank == world_size - 1,
                                                  .is_own = is_own,
                                                  .holds_zeros = holds_zeros});
  }

  template <class Device>
  void sum_squares(Device& device) const {
    device.launch(table.tensor_count, SumSquares{table});
  }

  // Only with feedback.
  template <class Device>
  void take_back(Device& device, const FeedbackStep& step) const {
    device.launch(table.tiling.tiles, TakeBack{table, step});
  }
};

}  // namespace cortado
