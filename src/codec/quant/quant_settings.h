// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What the parameters of `quant` mean.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "codec/quant/quant_kernels.h"
#include "cortado/spec.h"
#include "cortado/tensor_view.h"

namespace cortado {

struct QuantSettings {
  // Where steps come from.
  enum class StepRule : std::uint8_t { kBits, kBound, kAbsBound, kError };

  std::string spec;
  StepRule rule = StepRule::kBits;
  int bits = 4;
  std::int64_t block_elems = 256;  // a power of two
  BlockScale scale = BlockScale::kMax;
  Rounding rounding = Rounding::kNearest;
  float step = 0;     // kBits, kBound: in units of the block's scale; kAbsBound: absolute
  double error = 0;   // kError: of the whole tensor
  float filter = -1;  // in units of the block's scale; negative: off

  float largest_level() const { return bits == 1 ? 0.5f : static_cast<float>((1 << (bits - 1)) - 1); }
};

// Parameters that codecs share which round to multiples of a step.
Rounding rounding_named(const std::string& word);
Parameter rounding_parameter(const char* default_text);
Parameter error_parameter(const char* meaning);

std::vector<Parameter> quant_parameters();
Result<QuantSettings> read_quant_settings(const ParameterValues& values);

}  // namespace cortado
