// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The two algorithms of Espresso (EuroSys 2023, section 4.4): for comparison with all options of one device, and as a
// start of the search with the ways that are worth considering. They work on given buckets; as published each is one
// tensor.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "planner/search/problem.h"

namespace cortado {

// The options of one codec that encode and decode on one device, and those that do not encode, as candidates.
std::vector<int> options_on(Problem& problem, int codec, OpDevice device);

// What a bucket may do.
using WaysOf = std::function<std::vector<const Way*>(int first, int last)>;
WaysOf ways_of_options(Problem& problem, std::vector<int> options);

// Algorithm 1: buckets by size, largest first, of equal ones the latest first; each gets the one of its ways with the
// shortest step. Buckets that travel before a gap of the outermost link, and are not encoded, are left as they are.
// `plan`: what each bucket does at first. Ends early once `simulator` has done `until_steps`.
void choose_greedily(Problem& problem, const WaysOf& ways_of, Simulator* simulator, std::int64_t until_steps,
                     std::vector<Placed>* plan);

// Algorithm 2: of encoded buckets of equal size and option the first so many go to the CPU; every combination of such
// numbers is tried, or where there are more than `max_combinations` one group after the other.
void offload_to_cpu(Problem& problem, std::int64_t max_combinations, std::vector<Placed>* plan);

}  // namespace cortado
