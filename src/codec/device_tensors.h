// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What kernels know of the tensors of a batch, and how values and bytes are read and written in them. For kernels and
// those who launch them; light, since nvcc reads it three times for each file.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/device.h"
#include "core/float16.h"
#include "core/philox.h"
#include "cortado/tensor_view.h"

namespace cortado {

struct TensorEntry {
  void* data;
  std::byte* payload;
  std::int64_t rows, cols, elems;
  std::uint64_t max_payload_bytes;
  std::uint64_t seed, number;
  PhiloxKey key;  // of seed and number
  DType dtype;
};

// In device memory.
struct TensorTable {
  const TensorEntry* entries;
  std::uint64_t* payload_bytes;
  std::uint32_t* faults;
  const std::uint64_t* step;

  CORTADO_HD PhiloxStream stream_of(std::int64_t tensor) const { return {entries[tensor].key, *step}; }
};

constexpr std::uint32_t kCorruptPayload = 1;  // of faults

// Tensors cut into tiles of equal size, the last of each perhaps smaller; those of all tensors are numbered through.
struct Tile {
  std::int64_t tensor;
  std::int64_t number;  // in its tensor
  std::int64_t first;   // element
  std::int64_t elems;
};
struct Tiling {
  const std::int32_t* tensor_of_tile;
  const std::int64_t* first_tile;    // of a tensor
  const std::int64_t* tensor_elems;  // what is cut: not always the elements
  std::int64_t tiles;
  std::int64_t tile_elems;

  CORTADO_HD Tile tile(std::int64_t i) const {
    const std::int64_t tensor = tensor_of_tile[i];
    const std::int64_t number = i - first_tile[tensor], first = number * tile_elems;
    const std::int64_t left = tensor_elems[tensor] - first;
    return {tensor, number, first, left < tile_elems ? left : tile_elems};
  }
};

// ---- values --------------------------------------------------------------------------------------------------------

CORTADO_HD inline float load_value(const void* data, DType dtype, std::int64_t i) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[i];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(data)[i];
  return dtype == DType::kFloat16 ? fp16_to_float(bits) : bf16_to_float(bits);
}

CORTADO_HD inline void store_value(float value, void* data, DType dtype, std::int64_t i) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(data)[i] = value;
  } else {
    static_cast<std::uint16_t*>(data)[i] = dtype == DType::kFloat16 ? float_to_fp16(value) : float_to_bf16(value);
  }
}

// Values of a thread, `stride` apart, of which `rows` are there (0 or less: none); behind them are zeros. What they are
// is asked once and not before each, so that all loads are under way together.
template <int kRows, typename Stored>
CORTADO_HD void load_rows(const Stored* from, std::int64_t stride, std::int64_t rows, Stored* values) {
  if (rows >= kRows) {
    for (int row = 0; row < kRows; ++row) values[row] = from[row * stride];
  } else {
    for (int row = 0; row < kRows; ++row) values[row] = row < rows ? from[row * stride] : Stored{};
  }
}
template <int kRows, typename Stored>
CORTADO_HD void store_rows(const Stored* values, Stored* to, std::int64_t stride, std::int64_t rows) {
  if (rows >= kRows) {
    for (int row = 0; row < kRows; ++row) to[row * stride] = values[row];
  } else {
    for (int row = 0; row < kRows; ++row) {
      if (row < rows) to[row * stride] = values[row];
    }
  }
}

template <int kRows>
CORTADO_HD void load_values(const void* data, DType dtype, std::int64_t first, std::int64_t stride, std::int64_t rows,
                            float* values) {
  if (dtype == DType::kFloat32) {
    return load_rows<kRows>(static_cast<const float*>(data) + first, stride, rows, values);
  }
  std::uint16_t bits[kRows];
  load_rows<kRows>(static_cast<const std::uint16_t*>(data) + first, stride, rows, bits);
  if (dtype == DType::kFloat16) {
    for (int row = 0; row < kRows; ++row) values[row] = fp16_to_float(bits[row]);
  } else {
    for (int row = 0; row < kRows; ++row) values[row] = bf16_to_float(bits[row]);
  }
}
template <int kRows>
CORTADO_HD void store_values(const float* values, void* data, DType dtype, std::int64_t first, std::int64_t stride,
                             std::int64_t rows) {
  if (dtype == DType::kFloat32) {
    return store_rows<kRows>(values, static_cast<float*>(data) + first, stride, rows);
  }
  std::uint16_t bits[kRows];
  if (dtype == DType::kFloat16) {
    for (int row = 0; row < kRows; ++row) bits[row] = float_to_fp16(values[row]);
  } else {
    for (int row = 0; row < kRows; ++row) bits[row] = float_to_bf16(values[row]);
  }
  store_rows<kRows>(bits, static_cast<std::uint16_t*>(data) + first, stride, rows);
}

// ---- bytes of payloads, which need no alignment --------------------------------------------------------------------

template <typename T>
CORTADO_HD T load_bytes(const std::byte* from) {
  T value;
  memcpy(&value, from, sizeof(T));
  return value;
}

template <typename T>
CORTADO_HD void store_bytes(T value, std::byte* to) {
  memcpy(to, &value, sizeof(T));
}

struct alignas(16) Bytes16 {
  std::uint32_t words[4];
};

CORTADO_HD inline bool is_aligned(const void* memory, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(memory) % bytes == 0;
}

// Thread `thread` of `threads` copies its share; together they copy all.
template <typename Unit>
CORTADO_HD void copy_units(const std::byte* from, std::int64_t bytes, std::byte* to, int thread, int threads) {
  constexpr std::int64_t kUnit = sizeof(Unit);
  const std::int64_t units = bytes / kUnit;
  for (std::int64_t i = thread; i < units; i += threads) {
    reinterpret_cast<Unit*>(to)[i] = reinterpret_cast<const Unit*>(from)[i];
  }
  for (std::int64_t i = units * kUnit + thread; i < bytes; i += threads) to[i] = from[i];
}

// Four bytes at a time, whatever the distance of the two addresses: put together from two words of the source.
CORTADO_HD inline void copy_shifted(const std::byte* from, std::int64_t bytes, std::byte* to, int thread, int threads) {
  constexpr std::int64_t kUnit = 4;
  const auto head = static_cast<std::int64_t>((kUnit - reinterpret_cast<std::uintptr_t>(to) % kUnit) % kUnit);
  // The first and the last word may have neighbours that are not ours to read.
  const std::int64_t words = bytes < head + 2 * kUnit ? 0 : (bytes - head) / kUnit - 1;
  const auto offset = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(from + head) % kUnit);
  const auto* const source = reinterpret_cast<const std::uint32_t*>(from + head - offset);
  auto* const target = reinterpret_cast<std::uint32_t*>(to + head);
  const auto shift = static_cast<unsigned>(8 * offset);
  for (std::int64_t i = 1 + thread; i < words; i += threads) {
    target[i] = shift == 0 ? source[i] : source[i] >> shift | source[i + 1] << (32 - shift);
  }
  const std::int64_t first = words > 1 ? head + kUnit : bytes, last = words > 1 ? head + words * kUnit : bytes;
  for (std::int64_t i = thread; i < first; i += threads) to[i] = from[i];
  for (std::int64_t i = last + thread; i < bytes; i += threads) to[i] = from[i];
}

CORTADO_HD inline void copy_share(const std::byte* from, std::int64_t bytes, std::byte* to, int thread, int threads) {
  if (is_aligned(from, 16) && is_aligned(to, 16)) {
    copy_units<Bytes16>(from, bytes, to, thread, threads);
  } else {
    copy_shifted(from, bytes, to, thread, threads);
  }
}

}  // namespace cortado
