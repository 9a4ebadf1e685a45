// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/fp8/fp8.h"

#include <algorithm>

#include "codec/fp8/fp8_grid.h"
#include "codec/fp8/fp8_kernels.h"
#include "codec/quant/block_codec.h"

namespace cortado {

namespace {

// See block_codec.h.
class Fp8Scheme {
 public:
  static constexpr std::int64_t kSideBytesABlock = 1;
  static constexpr const char* kSideName = "scales";
  static std::string explain(std::span<const std::byte> scales) {
    return "exponents of two plus 127, 255 is NaN: " + first_values(scales, DType::kUint8);
  }

  Fp8Scheme(std::string spec, const Fp8Format& format, std::int64_t block_elems)
      : spec_(std::move(spec)), format_(format), block_elems_(block_elems) {}

  const std::string& spec() const { return spec_; }
  int bits() const { return 8; }
  std::int64_t block_elems() const { return block_elems_; }
  BlockScale scale() const { return BlockScale::kMax; }
  bool is_random() const { return false; }
  bool carries_key() const { return false; }
  float shared_step() const { return 0; }
  float tensor_step(ConstTensorView) const { return 0; }

  BlockGrid grid(const BlockStats& stats, std::int64_t, float, float largest_value) const {
    return fp8_grid(format_, stats.max_magnitude, largest_value);
  }

  void put(const BlockGrid& grid, std::byte* side) const { *side = static_cast<std::byte>(fp8_scale(grid)); }
  const char* take(const std::byte* side, float largest_value, BlockGrid* grid) const {
    const auto scale = static_cast<std::uint8_t>(*side);
    if (!is_fp8_scale(format_, scale, largest_value)) return "a scale is beyond those of finite values";
    *grid = fp8_grid_of(scale);
    return nullptr;
  }

  void quantise(const BlockPiece& piece, const RandomKey&, const float* values, std::int64_t prefetch_elems,
                std::uint8_t* codes) const {
    to_fp8(format_, piece, values, prefetch_elems, codes);
  }
  void dequantise(const BlockPiece& piece, const RandomKey&, const std::uint8_t* codes, bool streams,
                  float* values) const {
    from_fp8(format_, piece, codes, streams, values);
  }
  std::uint8_t largest_code() const { return 0xff; }
  bool are_legal(const std::uint8_t* codes, std::int64_t elems) const {
    std::uint8_t largest = 0;
    for (std::int64_t i = 0; i < elems; ++i) largest = std::max<std::uint8_t>(largest, codes[i] & 0x7fu);
    return largest <= format_.largest_code;
  }

 private:
  std::string spec_;
  Fp8Format format_;
  std::int64_t block_elems_;
};

Result<std::unique_ptr<Codec>> make_fp8(const ParameterValues& values) {
  CORTADO_ASSIGN_OR_RETURN(const std::int64_t block_elems, read_block_elems("fp8", values, 256));
  const std::string& format = values.word("format");
  const std::string spec = "fp8(" + format + ", block=" + block_text(block_elems) + ")";
  return std::unique_ptr<Codec>(
      std::make_unique<BlockCodec<Fp8Scheme>>(Fp8Scheme(spec, fp8_format_named(format), block_elems)));
}

}  // namespace

Fp8Format fp8_format_named(const std::string& word) { return word == "e5m2" ? kE5M2 : kE4M3; }

const CodecRow& fp8_row() {
  static const CodecRow row = {
      .name = "fp8",
      .wire_id = 9,
      .version = 1,
      .traits = {.divisible = true, .fixed_size = true, .needs_residual = true},
      .summary = "every value as an 8-bit float, a power of two as scale a block",
      .parameters = {{.name = "format",
                      .kind = ParameterKind::kChoice,
                      .default_text = "e4m3",
                      .choices = "e4m3|e5m2",
                      .meaning = "exponent and mantissa bits; e4m3 is more exact, e5m2 has more range in a block"},
                     block_parameter("256", "values that share a scale, a power of two")},
      .make = make_fp8,
  };
  return row;
}

}  // namespace cortado
