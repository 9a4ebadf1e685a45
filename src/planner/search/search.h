// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The search for the fastest plan: starts from many simple plans and from what Espresso's two algorithms make of the
// ways worth considering, improves the best by local search, and where there are few tensors tries everything. Ends
// early at a plan that reaches the lower bound.
#pragma once

#include <optional>
#include <vector>

#include "planner/search/lower_bound.h"
#include "planner/search/problem.h"

namespace cortado {

struct SearchResult {
  std::vector<Placed> plan;
  Score score;
  std::int64_t dense_ns = 0;  // of the best plan that does not encode
  LowerBound bound;
  bool is_exact = false;             // everything was tried: no plan of the candidates is faster
  std::optional<bool> is_cut_short;  // of a search: whether with more steps it might have found a faster one
  std::int64_t steps_done = 0;       // simulated operations
};

// What a search may spend where constraints do not say.
constexpr std::int64_t default_search_steps(int tensors) { return 60000 + 225 * static_cast<std::int64_t>(tensors); }

// What a search may spend: as its constraints say, or the default.
std::int64_t search_steps(const Problem& problem);

SearchResult search(Problem& problem);

}  // namespace cortado
