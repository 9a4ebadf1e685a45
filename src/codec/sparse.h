// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What the sparse codecs share: how many values a density keeps, checks of Sparsifier calls, single elements of tensors
// and random numbers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <string>

#include "codec/stage.h"
#include "core/checked_math.h"
#include "core/float16.h"
#include "core/philox.h"
#include "cortado/tensor_view.h"

namespace cortado {

// Below it no tensor of memory has so few kept values that positions do not fit the index formats.
constexpr double kMinDensity = 1e-6;

constexpr std::uint64_t kNoMemoryHoldsIt = std::numeric_limits<std::uint64_t>::max();

// Elements of a shape; nothing for shapes so large that sums of a few such sizes in bytes could overflow.
inline std::optional<std::int64_t> sparse_elems(std::int64_t rows, std::int64_t cols) {
  const std::optional<std::int64_t> elems = checked_elems(rows, cols);
  return elems.has_value() && *elems <= std::int64_t{1} << 56 ? elems : std::nullopt;
}

// max(1, ceil(density * elems)), 0 for an empty tensor. A product that is above an integer by the rounding of float64
// alone counts as that integer: 0.07 of 100 is 7.
inline std::int64_t kept_elems(double density, std::int64_t elems) {
  if (elems == 0) return 0;
  const double kept = std::ceil(density * static_cast<double>(elems) * (1 - 0x1p-51));
  return kept >= static_cast<double>(elems) ? elems : std::max(std::int64_t{1}, static_cast<std::int64_t>(kept));
}

// The arguments of Sparsifier::select() and scatter(); `codec` is the sparsifier as a codec.
Status check_select(const Codec& codec, ConstTensorView input, std::span<const float> values,
                    std::span<const std::byte> index, std::span<const std::byte> scratch);
Status check_scatter(const Codec& codec, std::span<const float> values, TensorView output);

// The tensor's elements first ... first + elems, in memory order.
inline ConstTensorView elements_of(ConstTensorView view, std::int64_t first, std::int64_t elems) {
  const auto offset = static_cast<std::size_t>(first) * dtype_bytes(view.dtype);
  return {static_cast<const std::byte*>(view.data) + offset, view.dtype, 1, elems};
}

// One element, widened exactly; no alignment needed.
template <DType kDType>
float read_element(const void* data, std::int64_t i) {
  constexpr std::size_t kBytes = dtype_bytes(kDType);
  const std::byte* const at = static_cast<const std::byte*>(data) + static_cast<std::size_t>(i) * kBytes;
  if constexpr (kDType == DType::kFloat32) {
    float value;
    std::memcpy(&value, at, kBytes);
    return value;
  } else {
    std::uint16_t value;
    std::memcpy(&value, at, kBytes);
    return kDType == DType::kFloat16 ? fp16_to_float(value) : bf16_to_float(value);
  }
}

// One element, narrowed as cast does it.
template <DType kDType>
void write_element(void* data, std::int64_t i, float value) {
  constexpr std::size_t kBytes = dtype_bytes(kDType);
  std::byte* const at = static_cast<std::byte*>(data) + static_cast<std::size_t>(i) * kBytes;
  if constexpr (kDType == DType::kFloat32) {
    std::memcpy(at, &value, kBytes);
  } else {
    const std::uint16_t narrow = kDType == DType::kFloat16 ? float_to_fp16(value) : float_to_bf16(value);
    std::memcpy(at, &narrow, kBytes);
  }
}

// A tensor that becomes zeros but for the values put, in ascending order of positions: zeros are written a little
// ahead, so that the values go to memory with them.
template <DType kDType>
class ZeroedAhead {
 public:
  explicit ZeroedAhead(TensorView output) : data_(static_cast<std::byte*>(output.data)), elems_(output.elems()) {}

  void put(std::int64_t position, float value) {
    while (position >= zeroed_) zero_piece();
    write_element<kDType>(data_, position, value);
  }
  void finish() {
    while (zeroed_ < elems_) zero_piece();
  }

 private:
  static constexpr std::int64_t kPieceElems = 4096;

  void zero_piece() {
    const std::int64_t count = std::min(kPieceElems, elems_ - zeroed_);
    constexpr std::size_t kBytes = dtype_bytes(kDType);
    std::memset(data_ + static_cast<std::size_t>(zeroed_) * kBytes, 0, static_cast<std::size_t>(count) * kBytes);
    zeroed_ += count;
  }

  std::byte* data_;
  std::int64_t elems_;
  std::int64_t zeroed_ = 0;
};

inline bool is_float_dtype(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

// Calls f.template operator()<dtype>() with the dtype, one of the three of is_float_dtype(), as a constant.
template <class F>
auto with_dtype(DType dtype, const F& f) {
  if (dtype == DType::kFloat16) return f.template operator()<DType::kFloat16>();
  if (dtype == DType::kBFloat16) return f.template operator()<DType::kBFloat16>();
  return f.template operator()<DType::kFloat32>();
}

}  // namespace cortado
