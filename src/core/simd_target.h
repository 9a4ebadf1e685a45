// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Which of the compiled instruction sets the SIMD kernels run on, and a way for tests to choose. A target is one of
// Highway's HWY_* bits.
#pragma once

#include <cstdint>
#include <vector>

namespace cortado {

// The target that kernels are dispatched to now; asked of a kernel, not of the table.
std::int64_t simd_target();

// "AVX2", "SSE4" ...
const char* simd_target_name(std::int64_t target);

// All targets that were compiled and that this machine has, the best one first.
std::vector<std::int64_t> simd_targets();

// While it lives, kernels of the whole process run on `target`. For tests and benchmarks: one at a time, and no kernel
// may be running when it begins or ends.
class ForcedSimdTarget {
 public:
  explicit ForcedSimdTarget(std::int64_t target);
  ~ForcedSimdTarget();
  ForcedSimdTarget(const ForcedSimdTarget&) = delete;
  ForcedSimdTarget& operator=(const ForcedSimdTarget&) = delete;
};

}  // namespace cortado
