// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The cheapest options of the whole tree, at given prices of the resources: the sum over resources of price times load.
// What is cheapest at no price that matters can't be worth its load to any plan; and the least cost at one price bounds
// what all options of the tree need together (lower_bound.h). The tree is a graph of few different places with equal
// futures, so that the search is a shortest path, exact, and touches all options without visiting each.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <vector>

#include "planner/cost/option_cost.h"

namespace cortado {

// Prices of a nanosecond on each resource. So many sets of them are looked at together, as fast as one.
constexpr int kPriceSets = 16;
using Costs = std::array<float, kPriceSets>;
using PriceSets = std::array<Costs, kMaxResources>;

// Shortest paths for one bucket and codec. Reuses its memory from call to call; one thread at a time.
class Pricer {
 public:
  // `tree`: of the space that the codec's traits and devices allow; all must outlive this.
  Pricer(const CostModel& model, const CodecCost* codec, const TreeGraph& tree) : model_(model), codec_(codec), tree_(tree) {}

  // Costs of the cheapest option with `min_encodes` to `max_encodes` encodes in each set; kNoOption where none can be
  // done. Exact to a few roundings of a float.
  Costs solve(const BucketShape& shape, const PriceSets& prices, int max_encodes, int min_encodes = 0);
  static constexpr float kNoOption = 1e30f;

  // The cheapest option in a set of the last solve(), which had one.
  Option option(int set) const;

  std::int64_t places_solved() const { return places_solved_; }

 private:
  struct Key {
    PathState state;
    std::int32_t place = 0;
    std::int32_t encodes_left = 0;  // of max_encodes
    bool operator==(const Key&) const = default;
  };
  struct Solved {
    Costs cost;
    std::array<std::int16_t, kPriceSets> edge;  // the first one to take; -1: none
    Key key;
    std::vector<std::int32_t> next;  // by edge: number of what it leads to; -1: can't be taken
  };

  std::int32_t number_of(const Key& key);  // -1: not seen before; then it has the next number
  std::int32_t solve_from(const OptionCost& cost, const Key& key, const PriceSets& prices);
  void grow_table();

  const CostModel& model_;
  const CodecCost* codec_;
  const TreeGraph& tree_;
  std::vector<std::int32_t> table_;  // open addressing: numbers of solved_, -1 where free
  std::deque<Solved> solved_;        // the first `used_` of them
  std::int32_t used_ = 0;
  std::int32_t root_ = 0;
  std::int32_t most_left_ = 0;  // encodes that may be left at the end
  std::int64_t places_solved_ = 0;
};

}  // namespace cortado
