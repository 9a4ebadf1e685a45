// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "planner/search/pricing.h"

#include <algorithm>

namespace cortado {

std::vector<TermTime> Pricer::make_times(const StateGraph& graph, const BucketShape& shape) const {
  const OptionCost cost(model_, codec_, shape);
  std::vector<TermTime> times(graph.terms.size());
  for (std::size_t t = 0; t < times.size(); ++t) {
    PathState state = graph.terms[t].before;
    OperationSteps steps;
    if (graph.terms[t].operation == nullptr) {
      cost.finish(&state, &steps);
    } else {
      cost.apply(*graph.terms[t].operation, &state, &steps);
    }
    for (int i = 0; i < steps.count; ++i) {
      times[t].time_ns[i] = static_cast<float>(steps.steps[i].time_ns);
      times[t].resource[i] = steps.steps[i].resource;
    }
  }
  return times;
}

const std::vector<TermTime>& Pricer::times_of(const StateGraph& graph, const BucketShape& shape) {
  if (shape.sums != nullptr) return times_ = make_times(graph, shape);
  for (const std::unique_ptr<Priced>& priced : priced_) {
    if (priced->graph == &graph && priced->shape == shape) return priced->times;
  }
  priced_.push_back(std::make_unique<Priced>(Priced{&graph, shape, make_times(graph, shape)}));
  return priced_.back()->times;
}

Costs Pricer::solve(const BucketShape& shape, const PriceSets& prices, int max_encodes, int min_encodes) {
  solved_ = &graphs_.get(model_, codec_, max_encodes, min_encodes);
  Costs none;
  none.fill(kNoOption);
  if (solved_->states.empty()) return none;
  const std::vector<TermTime>& times = times_of(*solved_, shape);
  term_costs_.resize(std::max(term_costs_.size(), times.size()));
  price_terms(times.data(), times.size(), prices, term_costs_.data());
  const std::size_t states = solved_->states.size();
  state_costs_.resize(std::max(state_costs_.size(), states));
  cheapest_from_states(*solved_, term_costs_.data(), kNoOption, state_costs_.data());
  return state_costs_[states - 1];
}

Option Pricer::option(int set) const {
  Option option;
  for (const StateGraph::State* at = &solved_->states.back(); at->home_term < 0;) {
    const StateGraph::Edge* cheapest = nullptr;
    float least = 2 * kNoOption;
    for (std::int32_t e = at->first_edge; e < at->last_edge; ++e) {
      const StateGraph::Edge& edge = solved_->edges[e];
      const float cost = term_costs_[edge.term][set] + state_costs_[edge.to][set];
      if (cost < least) least = cost, cheapest = &edge;
    }
    option.operations.push_back(*cheapest->operation);
    at = &solved_->states[cheapest->to];
  }
  return option;
}

}  // namespace cortado
