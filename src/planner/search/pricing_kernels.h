// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The loops of Pricer::solve(): sixteen sets of prices together, compiled for every instruction set; equal results on
// all of them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "planner/cost/option_cost.h"
#include "planner/search/state_graph.h"

namespace cortado {

// Prices of a nanosecond on each resource. So many sets of them are looked at together, as fast as one.
constexpr int kPriceSets = 16;
using Costs = std::array<float, kPriceSets>;
using PriceSets = std::array<Costs, kMaxResources>;

struct TermTime {
  std::array<float, 3> time_ns = {};  // of the steps of an operation, those that there are
  std::array<std::uint8_t, 3> resource = {};
};

// costs[t] = price times time, of all parts of times[t].
void price_terms(const TermTime* times, std::size_t count, const PriceSets& prices, Costs* costs);

// costs[s]: of the cheapest way from a state to the end, `none` where there is none. An edge's state comes before it.
void cheapest_from_states(const StateGraph& graph, const Costs* term_costs, float none, Costs* costs);

}  // namespace cortado
