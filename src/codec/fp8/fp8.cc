// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/fp8/fp8.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "codec/fp8/fp8_kernels.h"
#include "codec/quant/block_codec.h"

namespace cortado {

namespace {

// Scales are exponents in a byte, biased as float32's; 255 is NaN, as in OCP's microscaling formats.
constexpr int kScaleBias = 127;
constexpr std::uint8_t kNanScale = 255;
// From here on neither scaled nor decoded values meet float32's denormals.
constexpr int kSmallestExponent = -108;

float power_of_two(int exponent) { return std::bit_cast<float>(static_cast<std::uint32_t>(127 + exponent) << 23); }

int exponent_of(float value) { return static_cast<int>(std::bit_cast<std::uint32_t>(value) >> 23 & 0xffu) - 127; }

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
    if (stats.max_magnitude >= kInfinityBits) return of_scale(kNanScale);
    const float max = std::bit_cast<float>(stats.max_magnitude);
    int exponent = exponent_of(max) - exponent_of(format_.largest);
    if (mantissa_of(max) > mantissa_of(format_.largest)) ++exponent;
    BlockGrid grid = of_scale(static_cast<std::uint8_t>(std::max(exponent, kSmallestExponent) + kScaleBias));
    // Rounding up must not take the largest values of the dtype to Inf.
    const float reach = truncated(largest_value);
    if (max > reach) grid.reach = reach;
    return grid;
  }

  void put(const BlockGrid& grid, std::byte* side) const {
    *side = static_cast<std::byte>(std::bit_cast<std::uint32_t>(grid.step) >> 23 & 0xffu);
  }
  const char* take(const std::byte* side, float largest_value, BlockGrid* grid) const {
    const auto scale = static_cast<std::uint8_t>(*side);
    const int most = exponent_of(largest_value) - exponent_of(format_.largest) + 1 + kScaleBias;
    if (scale != kNanScale && (scale < kSmallestExponent + kScaleBias || scale > most)) {
      return "a scale is beyond those of finite values";
    }
    *grid = of_scale(scale);
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
  static std::uint32_t mantissa_of(float value) { return std::bit_cast<std::uint32_t>(value) & 0x007fffffu; }

  // The value without the mantissa bits that the format lacks.
  float truncated(float value) const {
    const std::uint32_t dropped = (1u << (23 - format_.mantissa_bits)) - 1;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) & ~dropped);
  }

  static BlockGrid of_scale(std::uint8_t scale) {
    BlockGrid grid;
    grid.step = scale == kNanScale ? std::numeric_limits<float>::quiet_NaN() : power_of_two(scale - kScaleBias);
    grid.inverse = scale == kNanScale ? 0.0f : power_of_two(kScaleBias - scale);
    return grid;
  }

  std::string spec_;
  Fp8Format format_;
  std::int64_t block_elems_;
};

Result<std::unique_ptr<Codec>> make_fp8(const ParameterValues& values) {
  CORTADO_ASSIGN_OR_RETURN(const std::int64_t block_elems, read_block_elems("fp8", values, 256));
  const std::string& format = values.word("format");
  const std::string spec = "fp8(" + format + ", block=" + block_text(block_elems) + ")";
  return std::unique_ptr<Codec>(
      std::make_unique<BlockCodec<Fp8Scheme>>(Fp8Scheme(spec, format == "e5m2" ? kE5M2 : kE4M3, block_elems)));
}

}  // namespace

const CodecRow& fp8_row() {
  static const CodecRow row = {
      .name = "fp8",
      .wire_id = 9,
      .version = 1,
      .traits = {.divisible = true, .fixed_size = true},
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
