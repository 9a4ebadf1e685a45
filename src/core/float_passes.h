// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Passes over float32 values in memory, with the vectors of the machine at hand: the same bits on every SIMD target.
// Pointers need no alignment. Memory that is written overlaps no other, but where that is said.
#pragma once

#include <cstdint>

namespace cortado {

// sum[i] += values[i]
void add_values(const float* values, std::int64_t elems, float* sum);

// scaled[i] = values[i] * scale; `scaled` may be `values`. `streams`: where it has the alignment of a float, whole
// cache lines of it go past the caches (core/streaming.h), and finish_streams() is the caller's.
void scale_values(const float* values, float scale, std::int64_t elems, float* scaled, bool streams = false);

// sum[i] += values[i] * scale, the product rounded first, and 0 where the magnitude of values[i] is not below `limit`,
// which is above 0. Returns false if there is such a value; NaN is one.
bool add_values_below(float limit, const float* values, float scale, std::int64_t elems, float* sum);

// Undoes that: undone[i] = sum[i] - values[i] * scale, the product rounded first, and sum[i] where the magnitude of
// values[i] is not below `limit`. Where no more than kRoundingShare (loss_scale.h) of the product is left, that is
// rounding and becomes 0. `undone` may be `sum`; if not, and where it begins on a cache line, it goes past the caches,
// and finish_streams() is the caller's.
void take_values_back_below(float limit, const float* values, float scale, std::int64_t elems, const float* sum,
                            float* undone);

}  // namespace cortado
