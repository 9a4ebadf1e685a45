// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The arithmetic that turns what the ranks of a LocalGroup bring to a collective into the result.
#pragma once

#include <span>

#include "cortado/communicator.h"

namespace cortado {

// True if the calls of two ranks may take part in one collective.
bool agree(const CollectiveCall& a, int rank_a, const CollectiveCall& b, int rank_b, int world_size);

// Writes the result to the `received` of every rank that gets one. The calls are in rank order, right and agree; their
// memory overlaps only as CollectiveCall allows.
//   sums  in rank order in float32, rounded once (to nearest even) to the dtype; NaN and Inf propagate. uint8 wraps
//         modulo 256. The sum over one rank keeps every bit.
// Does not allocate.
void combine(std::span<const CollectiveCall> of_rank);

}  // namespace cortado
