// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "codec/quant/quant_kernels.h"
#include "core/device.h"

namespace cortado {

// How values are quantised: what the parameters of `quant` mean.
struct QuantRule {
  // Where steps come from.
  enum class StepRule : std::uint8_t { kBits, kBound, kAbsBound, kError };

  StepRule rule = StepRule::kBits;
  int bits = 4;
  std::int64_t block_elems = 256;  // a power of two
  BlockScale scale = BlockScale::kMax;
  Rounding rounding = Rounding::kNearest;
  float step = 0;     // kBits, kBound: in units of the block's scale; kAbsBound: absolute
  double error = 0;   // kError: of the whole tensor
  float filter = -1;  // in units of the block's scale; negative: off

  CORTADO_HD float largest_level() const { return bits == 1 ? 0.5f : static_cast<float>((1 << (bits - 1)) - 1); }
};

}  // namespace cortado
