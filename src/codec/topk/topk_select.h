// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Which values top-k keeps: in one pass over memory with a threshold from a sample, and in more when that misleads.
#pragma once

#include <cstdint>

#include "codec/sparse.h"
#include "codec/topk/topk_kernels.h"
#include "cortado/tensor_view.h"

namespace cortado {

// Elements of fp32, fp16 or bf16 whose magnitude is larger.
std::int64_t count_above(ConstTensorView input, MagnitudeBound above);

// What a whole tensor or one block of it is to keep, 1 <= least <= most: exactly `least`, unless most is larger and
// what the threshold of the sample selects lies between the two. Kept are always the largest magnitudes, among equal
// ones those of lower positions.
struct KeepRange {
  std::int64_t least;
  std::int64_t most;
};

// Kept values in ascending order of positions, in memory of the caller's.
struct KeptList {
  float* values = nullptr;
  std::int64_t* positions = nullptr;
  float* sample = nullptr;
  std::int64_t count = 0;
};

// The sample of a unit of more than kUnsampledElems: one value in `every`, in runs of kSampleRun.
constexpr std::int64_t kUnsampledElems = 1024;
constexpr std::int64_t kSampleRun = 8;
std::int64_t sample_every(std::int64_t elems, std::int64_t least);
// Of how many of them the threshold is to be the bound, at first, and when too few or too many are above it.
struct SampleRanks {
  double first, wider, narrower;
};
SampleRanks sample_ranks(std::int64_t every, std::int64_t least);
// More than that many candidates are not worth collecting.
std::int64_t most_candidates(std::int64_t elems, std::int64_t least);

// Elements that `values` and `positions` must have room for behind `count`, and `sample`, to select from a unit
// of `elems` or fewer.
std::int64_t select_list_elems(std::int64_t elems, std::int64_t least);
std::int64_t select_sample_elems(std::int64_t elems);

// Appends what is kept of elements first ... first + elems of `input` (fp32, fp16 or bf16), elems > 0. The stream's
// numbers choose the sample.
void select_largest(ConstTensorView input, std::int64_t first, std::int64_t elems, KeepRange keep,
                    const PhiloxStream& stream, KeptList& list);

}  // namespace cortado
