// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// TensorView: pointer, dtype and shape of memory that somebody else owns. Never allocates, never frees; copying it
// copies the pointer. The memory must outlive every use of the view.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace cortado {

// Values are part of the wire format; do not renumber.
enum class DType : std::uint8_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kUint8 = 3 };

constexpr std::size_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kUint8:
      return 1;
  }
  return 0;
}

// "fp32", "fp16", "bf16", "uint8".
std::string_view dtype_name(DType dtype);

// A dense row-major matrix of `rows` x `cols` elements; a vector is 1 x cols, an empty tensor has rows * cols == 0.
// Tensors of more dimensions are seen as matrices: rows = the outermost dimension in memory, cols = the rest.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t rows = 0;
  std::int64_t cols = 0;

  std::int64_t elems() const { return rows * cols; }
  std::int64_t size_bytes() const { return elems() * static_cast<std::int64_t>(dtype_bytes(dtype)); }
};

struct ConstTensorView {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t rows = 0;
  std::int64_t cols = 0;

  ConstTensorView() = default;
  ConstTensorView(const void* d, DType t, std::int64_t r, std::int64_t c) : data(d), dtype(t), rows(r), cols(c) {}
  ConstTensorView(const TensorView& v) : data(v.data), dtype(v.dtype), rows(v.rows), cols(v.cols) {}  // NOLINT

  std::int64_t elems() const { return rows * cols; }
  std::int64_t size_bytes() const { return elems() * static_cast<std::int64_t>(dtype_bytes(dtype)); }
};

}  // namespace cortado
