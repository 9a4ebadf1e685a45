// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What a lossy encode took from some values, and how much of them that was.
#pragma once

#include <cstdint>

namespace cortado {

struct DifferenceSquares {
  double of_values = 0;
  double of_differences = 0;
};

// lost[i] = values[i] - decoded[i], unless `lost` is null; it may be `values`. Returns the squares of values and of
// differences, of which 16 sums are kept side by side for 1024 elements, so that all instruction sets give the same
// bits.
DifferenceSquares take_differences(const float* values, const float* decoded, std::int64_t elems, float* lost);

}  // namespace cortado
