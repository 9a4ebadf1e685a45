// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Counts of bits for code that runs on a GPU as well, where <bit>'s are wrong: nvcc takes them for constant expressions
// (--expt-relaxed-constexpr), knows no builtin behind them, and makes 64 of every std::countr_zero without a word.
#pragma once

#include <bit>
#include <cstdint>

#include "core/device.h"

namespace cortado {

// How many zeros are below the lowest one, or above the highest; of 0 all of them.
CORTADO_HD inline int trailing_zeros(std::uint64_t bits) {
#if defined(__CUDA_ARCH__)
  return bits == 0 ? 64 : __ffsll(static_cast<long long>(bits)) - 1;
#else
  return std::countr_zero(bits);
#endif
}
CORTADO_HD inline int leading_zeros(std::uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __clz(static_cast<int>(bits));
#else
  return std::countl_zero(bits);
#endif
}

CORTADO_HD inline int count_ones(std::uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __popc(bits);
#else
  return std::popcount(bits);
#endif
}

}  // namespace cortado
