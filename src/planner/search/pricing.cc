// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "planner/search/pricing.h"

#include <algorithm>

namespace cortado {

namespace {

std::uint64_t mixed(std::uint64_t hash, std::int64_t value) {
  hash = (hash ^ static_cast<std::uint64_t>(value)) * 0x9e3779b97f4a7c15u;
  return hash ^ hash >> 29;
}

std::uint64_t hash_of(const PathState& state, std::int32_t place, std::int32_t encodes_left) {
  std::uint64_t hash = mixed(static_cast<std::uint64_t>(place), encodes_left);
  hash = mixed(hash, state.parts << 20 | state.piece_parts);
  return mixed(hash, state.pieces << 10 | state.parted << 2 | static_cast<int>(state.place) << 1 |
                         static_cast<int>(state.encoded));
}

void add_cost(const OperationSteps& steps, const PriceSets& prices, Costs* cost) {
  for (int i = 0; i < steps.count; ++i) {
    const Costs& price = prices[steps.steps[i].resource];
    const auto time_ns = static_cast<float>(steps.steps[i].time_ns);
    for (int set = 0; set < kPriceSets; ++set) (*cost)[set] += price[set] * time_ns;
  }
}

}  // namespace

Costs Pricer::solve(const BucketShape& shape, const PriceSets& prices, int max_encodes, int min_encodes) {
  most_left_ = max_encodes - min_encodes;
  if (table_.empty()) table_.resize(1024);
  std::fill(table_.begin(), table_.end(), -1);
  used_ = 0;
  const OptionCost cost(model_, codec_, shape);
  root_ = solve_from(cost, {cost.begin(), 0, max_encodes}, prices);
  places_solved_ += used_;
  return solved_[root_].cost;
}

// The key's number if it has one; if not it gets the next one, and -1 is returned.
std::int32_t Pricer::number_of(const Key& key) {
  if (static_cast<std::size_t>(used_) * 2 > table_.size()) grow_table();
  const std::size_t mask = table_.size() - 1;
  for (std::size_t at = hash_of(key.state, key.place, key.encodes_left) & mask;; at = (at + 1) & mask) {
    if (table_[at] < 0) {
      table_[at] = used_;
      if (static_cast<std::size_t>(used_) == solved_.size()) solved_.emplace_back();
      solved_[used_++].key = key;
      return -1;
    }
    if (solved_[table_[at]].key == key) return table_[at];
  }
}

void Pricer::grow_table() {
  table_.assign(table_.size() * 4, -1);
  const std::size_t mask = table_.size() - 1;
  for (std::int32_t number = 0; number < used_; ++number) {
    const Key& key = solved_[number].key;
    std::size_t at = hash_of(key.state, key.place, key.encodes_left) & mask;
    while (table_[at] >= 0) at = (at + 1) & mask;
    table_[at] = number;
  }
}

std::int32_t Pricer::solve_from(const OptionCost& cost, const Key& key, const PriceSets& prices) {
  if (const std::int32_t known = number_of(key); known >= 0) return known;
  const std::int32_t number = used_ - 1;
  Solved& solved = solved_[number];  // a deque: stays where it is
  solved.edge.fill(-1);
  solved.next.clear();
  const TreeGraph::Place& place = tree_.places[key.place];
  if (place.is_done && key.encodes_left > most_left_) {
    solved.cost.fill(kNoOption);
    return number;
  }
  if (place.is_done) {
    PathState state = key.state;
    OperationSteps home;
    cost.finish(&state, &home);
    solved.cost.fill(0);
    add_cost(home, prices, &solved.cost);
    return number;
  }
  solved.cost.fill(kNoOption);
  for (std::size_t e = 0; e < place.edges.size(); ++e) {
    const Operation& operation = place.edges[e].operation;
    Key to = {key.state, place.edges[e].to, key.encodes_left - (operation.kind == OpKind::kEncode)};
    OperationSteps steps;
    if (to.encodes_left < 0 || !cost.apply(operation, &to.state, &steps)) {
      solved.next.push_back(-1);
      continue;
    }
    const std::int32_t next = solve_from(cost, to, prices);
    solved.next.push_back(next);
    Costs through = solved_[next].cost;
    add_cost(steps, prices, &through);
    for (int set = 0; set < kPriceSets; ++set) {
      const bool cheaper = through[set] < solved.cost[set];
      solved.cost[set] = cheaper ? through[set] : solved.cost[set];
      solved.edge[set] = cheaper ? static_cast<std::int16_t>(e) : solved.edge[set];
    }
  }
  return number;
}

Option Pricer::option(int set) const {
  Option option;
  for (std::int32_t at = root_; solved_[at].edge[set] >= 0;) {
    const Solved& solved = solved_[at];
    option.operations.push_back(tree_.places[solved.key.place].edges[solved.edge[set]].operation);
    at = solved.next[solved.edge[set]];
  }
  return option;
}

}  // namespace cortado
