// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Checks of sums that a transport makes. A check is linear: the checks of all contributions, summed by the transport as
// the contributions are, are the check of their sum, up to rounding (Huang and Abraham 1984, "Algorithm-based fault
// tolerance for matrix operations", section III, for the sum of a block).
//
// Floats: of each block of values two float32, their sum S and the sum M of their magnitudes. n numbers that are added
// in any order, each addition rounded to the nearest, are off by at most (n - 1) e / 2 times the sum of their
// magnitudes (e: from 1 to the next number of the format); S and M round in float32. So the sum of a block of sums is
// within (n + 1) e M of S. What is further off was damaged, and nothing undamaged is; what changes it by more than
// twice that is seen. One value that changes is, from this share of the magnitude of an average contribution on:
//
//   ranks   float32   fp16   bf16
//       4    0.005     2.5     20
//       8    0.018       9     72
//      64    0.13      520   4160
//
// (Blocks of float32 are 1024 values, from 9 ranks on 8192 / n but at least 64; of 16 bits they are 64.)
// Changes of several values of a block that cancel in its sum are not seen.
//
// uint8: of each block of 4096 values 13 sums modulo 256: of all, and of those whose number has bit k set (k < 12).
// Exact: any change of one or two values is seen (two that cancel in the first differ in the bit of some k).
#pragma once

#include <cstddef>
#include <cstdint>

#include "cortado/status.h"
#include "cortado/tensor_view.h"

namespace cortado {

// The format in which the checks of sums of `dtype` are summed, and how many numbers of it `elems` values have.
DType sum_check_dtype(DType dtype);
std::int64_t sum_check_elems(DType dtype, std::int64_t elems, int ranks);

// Neither has to be aligned.
void write_sum_checks(const void* values, DType dtype, std::int64_t elems, int ranks, void* checks);

// Whether `sums` over `ranks` ranks fit the summed checks; kCorruptData with the block that does not, and by how much.
// Nothing is said of a float block in which some contribution, or a sum without damage, may be Inf or NaN.
Status compare_with_sum_checks(const void* sums, DType dtype, std::int64_t elems, const void* checks, int ranks);

}  // namespace cortado
