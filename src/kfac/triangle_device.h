// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Triangles and matrices (triangle.h) on a device: many of one size, one behind the other.
#pragma once

#include "core/device.h"
#include "kfac/triangle.h"

namespace cortado {

// Blocks of kThreads elements; a launch of element_blocks(elems).
constexpr int kElementThreads = 256;
constexpr std::int64_t element_blocks(std::int64_t elems) { return (elems + kElementThreads - 1) / kElementThreads; }

// matrices = both triangles, with dampings[i] added to the diagonal of matrix i.
struct ExpandTriangles {
  static constexpr int kThreads = kElementThreads;

  std::int64_t n, count;
  const float* triangles;
  const float* dampings;
  float* matrices;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    block.each([&](int t) {
      const std::int64_t at = block.number() * kThreads + t;
      if (at >= count * n * n) return;
      const std::int64_t matrix = at / (n * n), row = at % (n * n) / n, col = at % n;
      const std::int64_t i = row > col ? row : col, j = row > col ? col : row;
      const float value = triangles[matrix * triangle_elems(n) + triangle_elems(i) + j];
      matrices[at] = row == col ? value + dampings[matrix] : value;
    });
  }
};

// The upper triangles become those of the lower ones.
struct MirrorMatrices {
  static constexpr int kThreads = kElementThreads;

  std::int64_t n, count;
  float* matrices;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    block.each([&](int t) {
      const std::int64_t at = block.number() * kThreads + t;
      if (at >= count * n * n) return;
      const std::int64_t first = at / (n * n) * (n * n), row = at % (n * n) / n, col = at % n;
      if (col > row) matrices[at] = matrices[first + col * n + row];
    });
  }
};

}  // namespace cortado
