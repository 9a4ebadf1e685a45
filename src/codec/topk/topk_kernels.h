// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Comparisons of magnitudes, the same results on every SIMD target. The magnitude of a value is its bits without the
// sign, an integer from 0 to 2^31 - 1: it orders finite values as they are, Inf above them and NaN above Inf.
//
// Preconditions: elems >= 0, -1 <= above < 2^31. Inputs need no alignment.
#pragma once

#include <cstdint>

namespace cortado {

// The largest magnitude that is not kept; -1 keeps all.
using MagnitudeBound = std::int32_t;

constexpr std::int64_t kCollectSlack = 64;

// Writes the values whose magnitude is larger than `above` and their positions, `first` for input[0], in ascending
// order, and returns how many. Ends early, with more than `capacity` of them, once there are more than that; `values`
// and `positions` have room for capacity + kCollectSlack and no defined contents behind what was counted.
std::int64_t collect_above(const float* input, std::int64_t elems, MagnitudeBound above, std::int64_t first,
                           std::int64_t capacity, float* values, std::int64_t* positions);

std::int64_t count_above(const float* input, std::int64_t elems, MagnitudeBound above);

// A bound that exactly k magnitudes are above or, where equal ones forbid that, the largest one that more than k are
// above. At least k >= 1 must be above `lowest`. Reads the input up to 32 times: for what stays in cache.
MagnitudeBound bound_of_largest(const float* input, std::int64_t elems, std::int64_t k, MagnitudeBound lowest);

}  // namespace cortado
