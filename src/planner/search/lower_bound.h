// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// A time that no plan can beat: over all options of the whole tree with all allowed codecs, all fusions and all orders
// of service. The largest of these:
//
//   (a) the compute stream: backward pass, optimizer, forward pass
//   (b) one tensor: its ready time, and the least time that any option takes for a bucket of its size; larger buckets
//       take no less
//   (c) loads, for any first tensor j and any weights w of the resources and v of the compute stream that sum to 1:
//       what becomes ready from j on needs each resource for its load after r_j, and codecs and transfers keep the
//       compute stream, so that the last arrival A has
//         A >= r_j + load(resource)          for each resource, with the loads of all buckets from j on
//         A >= backward + the sum of slowdown * load over GPU codecs, CPU codecs (per worker) and the outer link,
//              with slowdowns that sum to 1 at most: what is not done when the backward pass ends comes after it
//       and the weighted sum of these is at least (1 - v) r_j + v backward + the least weighted load of any option.
//       The least load of a bucket per element is that of all elements in one bucket, as no time per element rises with
//       the size; the weights are searched for the largest bound. This is linear-programming duality: every choice of
//       weights is a proof.
//       One tensor's own way can take part with a weight of its own: its ready time and the time of all its steps.
//
// After the arrival come optimizer and forward pass; where the forward pass overlaps, the part of it that needs the
// tensor of (b), the first one of (c), or comes after.
//
// (b) and (c) rest on times that do not fall with size, which cluster files have, and (c) on times per element that do
// not rise, which curves of a launch time and a bandwidth have; Problem::for_bounds() sees to that.
#pragma once

#include <cstdint>

#include "planner/search/problem.h"

namespace cortado {

struct LowerBound {
  std::int64_t step_ns = 0;
  const char* reason = "";  // which of the above
  // Of (a) and (b): computed costs are off by so much at most, so that none can tell from the bound what is no further
  // above it.
  std::int64_t rounding_ns = 0;
};

// (a) and (b), fast.
LowerBound quick_bound(Problem& problem);

// The larger of `known` and (c). `good_enough_ns`: the time of a plan; near it the search for a better bound ends.
LowerBound lower_bound(Problem& problem, const LowerBound& known, std::int64_t good_enough_ns);

}  // namespace cortado
