// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Other ways to choose, to compare with: make_plan()'s strategies but "cortado".
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "planner/search/search.h"

namespace cortado {

std::vector<const char*> strategy_names();

// The plan with the fusion that suits it best. An error if the strategy is unknown, or needs a codec that is not there.
Result<SearchResult> run_strategy(Problem& problem, std::string_view strategy);

// Largest sizes of a bucket that are worth trying, from all in one to each tensor by itself (0).
std::vector<std::int64_t> fusion_caps(const Problem& problem);

// The way without encodes that takes least time by itself.
const Way* fastest_dense_way(Problem& problem, int first, int last);

}  // namespace cortado
