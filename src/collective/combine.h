// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What the ranks of a LocalGroup bring to a collective, and the arithmetic that turns it into the result.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "cortado/tensor_view.h"

namespace cortado {

struct Contribution {
  enum class Kind { kAllReduce, kAllGather };

  Kind kind = Kind::kAllReduce;
  DType dtype = DType::kFloat32;  // kUint8 for an all-gather
  std::int64_t elems = 0;         // brought by this rank
  const void* sent = nullptr;
  void* received = nullptr;  // all-reduce: the same memory as `sent`
};

// True if both may take part in one collective.
bool agree(const Contribution& a, const Contribution& b);

// "all_reduce bf16 1024", "all_gather uint8 64".
std::string describe(const Contribution& contribution);

// Writes the result to every rank's `received`. All contributions agree; they are in rank order and their memory does
// not overlap, except that a rank's `sent` may lie at its own place in its `received`.
//   all-reduce  sum in rank order in float32, rounded once (to nearest even) to the dtype; NaN and Inf propagate.
//               uint8 wraps modulo 256.
//   all-gather  the `sent` bytes of all ranks one after the other.
// Does not allocate.
void combine(std::span<const Contribution> of_rank);

}  // namespace cortado
