// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Checks of sums that a transport makes. A check is linear: the checks of all contributions, summed by the transport as
// the contributions are, are the check of their sum, up to rounding (Huang and Abraham 1984, "Algorithm-based fault
// tolerance for matrix operations", section III, for the sum of a block).
//
//   float32, fp16, bf16   of each block of 1024 (16 bits: 64) values two float32: the sum of the values, S, and of
//   their
//                         magnitudes, M. n numbers added in any order, each addition rounded to the format or cut off
//                         (machine epsilon e), are off by at most (n - 1) e times the sum of their magnitudes; so the
//                         block's sum is off by at most n e M, the rounding of S and M included.
//   uint8                 of each block of 4096 values four sums modulo 256, of value times a weight, the first of
//   which
//                         is 1. Exact: one changed byte is always seen, anything else but for one in 2^32.
//
// So damage is seen wherever it moves the sum of a block by more than twice n e M, and what is not seen is no more than
// rounding might do to a block: for float32 and 4 ranks 2^-21 of its magnitudes, some thousandths of one value.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cortado/status.h"
#include "cortado/tensor_view.h"

namespace cortado {

// The format in which the checks of sums of `dtype` are summed, and how many numbers of it `elems` values have.
DType sum_check_dtype(DType dtype);
std::int64_t sum_check_elems(DType dtype, std::int64_t elems);

// Neither has to be aligned.
void write_sum_checks(const void* values, DType dtype, std::int64_t elems, void* checks);

// Whether `sums` over `ranks` ranks fit the summed checks; kCorruptData with the block that does not, and by how much.
// Nothing is said of a float block in which some contribution, or a sum without damage, may be Inf or NaN.
Status compare_with_sum_checks(const void* sums, DType dtype, std::int64_t elems, const void* checks, int ranks);

}  // namespace cortado
