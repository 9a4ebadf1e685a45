// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Sizes that come from outside are computed with these; an overflow is an answer, not undefined behaviour.
#pragma once

#include <concepts>
#include <cstdint>
#include <limits>
#include <optional>

#include "cortado/tensor_view.h"

namespace cortado {

template <std::integral T>
constexpr std::optional<T> checked_add(T a, T b) {
  T sum;
  return __builtin_add_overflow(a, b, &sum) ? std::nullopt : std::optional<T>(sum);
}

template <std::integral T>
constexpr std::optional<T> checked_mul(T a, T b) {
  T product;
  return __builtin_mul_overflow(a, b, &product) ? std::nullopt : std::optional<T>(product);
}

// The largest there is where the sum of two that are not negative would be larger.
constexpr std::int64_t capped_add(std::int64_t a, std::int64_t b) {
  return checked_add(a, b).value_or(std::numeric_limits<std::int64_t>::max());
}

// rows * cols; nothing if either is negative or the product does not fit.
constexpr std::optional<std::int64_t> checked_elems(std::int64_t rows, std::int64_t cols) {
  if (rows < 0 || cols < 0) return std::nullopt;
  return checked_mul(rows, cols);
}

// Bytes of a tensor of that shape; nothing if no memory can hold it or the dtype is none.
constexpr std::optional<std::int64_t> checked_size_bytes(std::int64_t rows, std::int64_t cols, DType dtype) {
  const std::optional<std::int64_t> elems = checked_elems(rows, cols);
  const auto elem_bytes = static_cast<std::int64_t>(dtype_bytes(dtype));
  if (!elems.has_value() || elem_bytes == 0) return std::nullopt;
  return checked_mul(*elems, elem_bytes);
}

}  // namespace cortado
