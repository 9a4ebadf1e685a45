// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What decompositions of several matrices at once begin with on a device.
#pragma once

#include "core/device.h"

namespace cortado {

// `count` identities of n x n, one behind the other, and where each of them and of as many other matrices lies.
struct BeginBatch {
  static constexpr int kThreads = 256;

  std::int64_t n, count;
  float* matrices;
  float* identities;
  float** matrix_pointers;
  float** identity_pointers;

  std::int64_t blocks() const { return (count * n * n + kThreads - 1) / kThreads; }

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    block.each([&](int t) {
      const std::int64_t at = block.number() * kThreads + t;
      if (at >= count * n * n) return;
      const std::int64_t number = at / (n * n), in_matrix = at % (n * n);
      identities[at] = in_matrix / n == in_matrix % n ? 1.0f : 0.0f;
      if (in_matrix == 0) matrix_pointers[number] = matrices + at, identity_pointers[number] = identities + at;
    });
  }
};

}  // namespace cortado
