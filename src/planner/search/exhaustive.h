// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Branch and bound over all fusions and all options of the whole tree, where there are few enough.
#pragma once

#include "planner/search/local_search.h"

namespace cortado {

// Offers `local` the best of all plans, if no more than `max_ways` options for buckets have to be looked at and no more
// than `until_steps` operations simulated: first of the ways that no other one beats, then of all, as a way that takes
// more may still give a better order of service. True: all were tried.
bool try_everything(Problem& problem, LocalSearch* local, std::int64_t max_ways, std::int64_t until_steps);

// For each bucket of the plan every option of the whole tree, while the others stay, until nothing helps.
void try_every_option(Problem& problem, LocalSearch* local, std::int64_t until_steps);

}  // namespace cortado
