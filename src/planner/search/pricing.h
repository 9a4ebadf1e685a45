// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The cheapest options of the whole tree, at given prices of the resources: the sum over resources of price times load.
// What is cheapest at no price that matters can't be worth its load to any plan; and the least cost at one price bounds
// what all options of the tree need together (lower_bound.h). A shortest path among the states of the tree, exact,
// which touches all options without visiting each.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "planner/cost/option_cost.h"
#include "planner/search/pricing_kernels.h"
#include "planner/search/state_graph.h"

namespace cortado {

// What a bucket might be short of, one bit each: every combination is one set of prices.
enum Scarce { kScarceGpu = 1, kScarceCpu = 2, kScarceOuterLink = 4, kScarceInnerLinks = 8 };
static_assert(kPriceSets == 2 * kScarceInnerLinks);

// Which of them a resource is. Copies are the CPU's.
constexpr Scarce scarcity_of(int resource, int levels) {
  if (resource >= kLink) return resource == kLink + levels - 1 ? kScarceOuterLink : kScarceInnerLinks;
  return resource == kGpuCodec ? kScarceGpu : kScarceCpu;
}

// Shortest paths for one bucket and codec. Reuses its memory from call to call; one thread at a time.
class Pricer {
 public:
  // `codec`: nullptr for options that do not encode. All must outlive this.
  Pricer(const CostModel& model, const CodecCost* codec, StateGraphs* graphs)
      : model_(model), codec_(codec), graphs_(*graphs) {}

  // Costs of the cheapest option with `min_encodes` to `max_encodes` encodes in each set; kNoOption where none can be
  // done. Exact to a few roundings of a float.
  Costs solve(const BucketShape& shape, const PriceSets& prices, int max_encodes = kUnlimited, int min_encodes = 0);
  static constexpr float kNoOption = 1e30f;
  static constexpr int kUnlimited = StateGraph::kUnlimited;

  // The cheapest option in a set of the last solve(), which had one.
  Option option(int set) const;

 private:
  // Bounds and candidates ask for few shapes again and again; of real buckets there are too many to keep.
  struct Priced {
    const StateGraph* graph;
    BucketShape shape;
    std::vector<TermTime> times;
  };

  const std::vector<TermTime>& times_of(const StateGraph& graph, const BucketShape& shape);
  std::vector<TermTime> make_times(const StateGraph& graph, const BucketShape& shape) const;

  const CostModel& model_;
  const CodecCost* codec_;
  StateGraphs& graphs_;
  std::vector<std::unique_ptr<Priced>> priced_;
  std::vector<TermTime> times_;
  const StateGraph* solved_ = nullptr;  // of the last solve(), with its costs:
  std::vector<Costs> term_costs_, state_costs_;
};

}  // namespace cortado
