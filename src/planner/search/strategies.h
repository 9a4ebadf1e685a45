// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Other ways to choose, to compare with: make_plan()'s strategies but "cortado".
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "planner/search/local_search.h"
#include "planner/search/search.h"

namespace cortado {

std::vector<const char*> strategy_names();

// The plan with the best of the fusions up to `fusion_caps()`, of "dense" the fastest that is found. An error if the
// strategy is unknown, or needs a codec that is not there.
Result<SearchResult> run_strategy(Problem& problem, std::string_view strategy);

// What the strategy bf16 casts to: cast(bf16), or cast(fp16), which takes the same, where the cluster has no times of
// it.
std::string cast_of_bf16(const Cluster& cluster);

// Largest sizes of a bucket that are worth trying, from all in one to each tensor by itself (0).
std::vector<std::int64_t> fusion_caps(const Problem& problem);

// Plans of more buckets cost more to simulate, and are rarely good.
constexpr std::size_t kFewBuckets = 64;

// Plans that do not encode.
struct DensePlans {
  std::vector<Placed> by_size;  // the fastest whose buckets are all up to some size
  Score by_size_score;
  // That one improved by local search as any other plan is, so that compression is not credited with what fusion gains.
  std::vector<Placed> fastest;
  Score fastest_score;
};
DensePlans find_dense_plans(Problem& problem, LocalSearch* local);

// Buckets up to a size, each by the way without encodes that takes least time by itself.
std::vector<Placed> dense_plan(Problem& problem, std::int64_t cap_bytes);

}  // namespace cortado
