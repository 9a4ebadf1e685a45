// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What a codec offers besides Codec if others can stand behind it in a composition ("topk | quant | rans"):
//
//   Sparsifier  picks values and says where they were; the picked values are a float32 vector, which any codec of
//               float32 may take further
//   Quantiser   turns values into codes of one byte each and a side section (scales); an entropy coder may take the
//               codes further
//
// The rules of codec.h hold: no allocation, every span checked, hostile index and side sections.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cortado/codec.h"

namespace cortado {

struct Selection {
  std::int64_t kept = 0;          // values written
  std::uint64_t index_bytes = 0;  // bytes of the index section written
};

class Sparsifier {
 public:
  virtual ~Sparsifier() = default;

  // Upper bounds for a shape, pure; a sparsifier with a fixed number of values always keeps max_kept().
  virtual std::int64_t max_kept(std::int64_t rows, std::int64_t cols) const = 0;
  virtual std::uint64_t max_index_bytes(std::int64_t rows, std::int64_t cols) const = 0;
  virtual std::uint64_t select_scratch_bytes(std::int64_t rows, std::int64_t cols, DType dtype) const = 0;

  // Whether which values are kept depends on (seed, step, tensor) alone, so that ranks can add their values up.
  virtual bool is_shared() const = 0;

  // Whether kept values are scaled up, so that the mean over keys is what there was: a second select() of what came of
  // the first must have another key, or it keeps the same ones and scales them again.
  virtual bool scales_up() const { return false; }

  // Writes the kept values, scaled as decoding must give them back, and the index section. `values` has room for
  // max_kept(), `index` for max_index_bytes().
  virtual Result<Selection> select(ConstTensorView input, const EncodeContext& context, std::span<float> values,
                                   std::span<std::byte> index, std::span<std::byte> scratch) const = 0;

  // How many values an index section of a tensor of that shape stands for, and that it is whole: kCorruptData for
  // anything select() can't have written. Checked before scatter().
  virtual Result<std::int64_t> check_index(std::span<const std::byte> index, std::int64_t rows,
                                           std::int64_t cols) const = 0;

  // As Codec::explain, of an index section.
  virtual std::vector<PayloadSection> explain_index(std::span<const std::byte> index, std::int64_t rows,
                                                    std::int64_t cols) const = 0;

  // Zeros everywhere but where the index says; values.size() is what check_index gave.
  virtual Status scatter(std::span<const std::byte> index, std::span<const float> values, TensorView output,
                         std::span<std::byte> scratch) const = 0;
};

class Quantiser {
 public:
  virtual ~Quantiser() = default;

  virtual int code_bits() const = 0;  // codes are below 2^code_bits()
  virtual std::uint64_t max_side_bytes(std::int64_t rows, std::int64_t cols) const = 0;
  virtual std::uint64_t quantise_scratch_bytes(std::int64_t rows, std::int64_t cols, DType dtype) const = 0;

  // One code a value into `codes` (elems long); returns the bytes of the side section written.
  virtual Result<std::uint64_t> quantise(ConstTensorView input, const EncodeContext& context,
                                         std::span<std::uint8_t> codes, std::span<std::byte> side,
                                         std::span<std::byte> scratch) const = 0;

  // kCorruptData for a side section or a code that quantise() can't have written.
  virtual Status dequantise(std::span<const std::uint8_t> codes, std::span<const std::byte> side, TensorView output,
                            std::span<std::byte> scratch) const = 0;
  // The same, added to `sum`, which is fp32; only of a codec that can_add().
  virtual Status dequantise_add(std::span<const std::uint8_t> codes, std::span<const std::byte> side, TensorView sum,
                                std::span<std::byte> scratch) const {
    (void)codes, (void)side, (void)sum, (void)scratch;
    return make_error(StatusCode::kUnsupported, "this quantiser does not add");
  }

  // As Codec::explain, of a side section.
  virtual std::vector<PayloadSection> explain_side(std::span<const std::byte> side, std::int64_t rows,
                                                   std::int64_t cols) const = 0;
};

}  // namespace cortado
