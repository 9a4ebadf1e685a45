// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Passes over float32 values in memory, with the vectors of the machine at hand: the same bits on every SIMD target.
// Pointers need no alignment.
#pragma once

#include <cstdint>

namespace cortado {

// sum[i] += values[i]
void add_values(const float* values, std::int64_t elems, float* sum);

// scaled[i] = values[i] * scale; `scaled` may be `values`. `streams`: whole cache lines of it past the caches
// (core/streaming.h), and finish_streams() is the caller's.
void scale_values(const float* values, float scale, std::int64_t elems, float* scaled, bool streams = false);

// sum[i] += values[i] * scale, the product rounded first, where the magnitude of values[i] is below `limit`, which is
// above 0. Returns false if some is not, NaN included.
bool add_values_below(float limit, const float* values, float scale, std::int64_t elems, float* sum);

}  // namespace cortado
