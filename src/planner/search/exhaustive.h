// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Branch and bound over all fusions and all options of the whole tree, where there are few enough.
#pragma once

#include "planner/search/local_search.h"

namespace cortado {

// Whether all plans together have no more than so many options for buckets.
bool can_try_everything(const Problem& problem, std::int64_t max_ways);

// Offers `local` the best of all plans, if no more than `until_steps` operations have to be simulated: first of the
// ways that no other one beats, then of all, as a way that takes more may still give a better order of service. True:
// all were tried.
bool try_everything(Problem& problem, LocalSearch* local, std::int64_t until_steps);

// For each bucket of the plan every option of the whole tree, while the others stay, until nothing helps.
void try_every_option(Problem& problem, LocalSearch* local, std::int64_t until_steps);

}  // namespace cortado
