// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/quant/quant.h"

#include <cstring>

#include "codec/composition/composition.h"
#include "codec/quant/block_codec.h"
#include "codec/quant/quant_grid.h"
#include "codec/quant/quant_search.h"
#include "codec/quant/quant_settings.h"
#include "core/check.h"

namespace cortado {

namespace {

// See block_codec.h.
class QuantScheme {
 public:
  static constexpr std::int64_t kSideBytesABlock = sizeof(float);
  static constexpr const char* kSideName = "steps";
  static std::string explain(std::span<const std::byte> steps) { return first_values(steps, DType::kFloat32); }

  explicit QuantScheme(QuantSettings settings)
      : settings_(std::move(settings)), levels_{settings_.rounding, settings_.largest_level(), settings_.filter >= 0} {}

  const std::string& spec() const { return settings_.spec; }
  int bits() const { return settings_.bits; }
  std::int64_t block_elems() const { return settings_.block_elems; }
  BlockScale scale() const { return settings_.scale; }
  bool is_random() const { return settings_.rounding == Rounding::kStochastic || carries_key(); }
  bool carries_key() const { return settings_.rounding == Rounding::kDither; }

  float shared_step() const {
    const bool is_shared = settings_.rule == QuantRule::StepRule::kAbsBound && !carries_key() && settings_.bits > 1;
    return is_shared ? std::max(settings_.step, kSmallestStep) : 0;
  }
  float tensor_step(ConstTensorView input) const {
    if (settings_.rule != QuantRule::StepRule::kError) return 0;
    return find_step(settings_.rounding, settings_.error, input);
  }
  BlockGrid grid(const BlockStats& stats, std::int64_t elems, float tensor_step, float largest_value) const {
    return block_grid(settings_, stats, elems, tensor_step, largest_value);
  }

  void put(const BlockGrid& grid, std::byte* side) const { std::memcpy(side, &grid.step, sizeof(float)); }
  const char* take(const std::byte* side, float largest_value, BlockGrid* grid) const {
    std::memcpy(&grid->step, side, sizeof(float));
    return is_legal_step(grid->step, largest_value) ? nullptr : "a step is not 0, NaN or from 2^-116 on";
  }

  void quantise(const BlockPiece& piece, const RandomKey& random, const float* values, std::int64_t prefetch_elems,
                std::uint8_t* codes) const {
    quantise_values(levels_, piece, random, values, prefetch_elems, codes);
  }
  void dequantise(const BlockPiece& piece, const RandomKey& random, const std::uint8_t* codes, bool streams,
                  float* values) const {
    dequantise_values(levels_, piece, random, codes, streams, values);
  }
  std::uint8_t largest_code() const { return static_cast<std::uint8_t>(2 * levels_.largest); }
  bool are_legal(const std::uint8_t* codes, std::int64_t elems) const {
    return largest_of_codes(codes, elems) <= largest_code();
  }

 private:
  QuantSettings settings_;
  Levels levels_;
};

Result<std::unique_ptr<Codec>> make_quant(const ParameterValues& values) {
  CORTADO_ASSIGN_OR_RETURN(QuantSettings settings, read_quant_settings(values));
  std::unique_ptr<Codec> codec = std::make_unique<BlockCodec<QuantScheme>>(QuantScheme(std::move(settings)));
  if (values.word("coder") == "none") return codec;
  CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<Codec> coder, make_codec("rans"));
  std::vector<std::unique_ptr<Codec>> stages;
  stages.push_back(std::move(codec));
  stages.push_back(std::move(coder));
  return make_composition(std::move(stages));
}

}  // namespace

const CodecRow& quant_row() {
  static const CodecRow row = {
      .name = "quant",
      .wire_id = 8,
      .version = 1,
      .traits = {.divisible = true, .fixed_size = true, .needs_residual = true},
      .summary = "every value as one of up to 2^bits levels, a step a block (QSGD, TernGrad and others are settings)",
      .parameters = quant_parameters(),
      .make = make_quant,
  };
  return row;
}

}  // namespace cortado
