// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Branch and bound over all fusions and all options of the whole tree, where there are few enough.
#pragma once

#include "planner/search/local_search.h"

namespace cortado {

// Whether all plans can be tried with so many simulations.
bool can_try_everything(const Problem& problem, std::int64_t max_plans);

// The best of all plans, offered to `local`.
void try_everything(Problem& problem, LocalSearch* local);

// For each bucket of the plan every option of the whole tree, while the others stay, until nothing helps.
void try_every_option(Problem& problem, LocalSearch* local, std::int64_t until_steps);

}  // namespace cortado
