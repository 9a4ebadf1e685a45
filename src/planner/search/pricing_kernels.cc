// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "planner/search/pricing_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "planner/search/pricing_kernels.cc"
#include "core/simd.h"

HWY_BEFORE_NAMESPACE();
namespace cortado {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using D = hn::CappedTag<float, kPriceSets>;
constexpr std::size_t kStep = hn::MaxLanes(D());
constexpr std::size_t kVectors = kPriceSets / kStep;

void PriceTerms(const TermTime* times, std::size_t count, const PriceSets& prices, Costs* costs) {
  const D d;
  for (std::size_t t = 0; t < count; ++t) {
    const float* first = prices[times[t].resource[0]].data();
    const float* second = prices[times[t].resource[1]].data();
    const float* third = prices[times[t].resource[2]].data();
    const auto first_ns = hn::Set(d, times[t].time_ns[0]), second_ns = hn::Set(d, times[t].time_ns[1]);
    const auto third_ns = hn::Set(d, times[t].time_ns[2]);
    for (std::size_t v = 0; v < kPriceSets; v += kStep) {
      const auto cost =
          hn::Add(hn::Mul(hn::LoadU(d, first + v), first_ns), hn::Mul(hn::LoadU(d, second + v), second_ns));
      hn::StoreU(hn::Add(cost, hn::Mul(hn::LoadU(d, third + v), third_ns)), d, costs[t].data() + v);
    }
  }
}

void CheapestFromStates(const StateGraph& graph, const Costs* term_costs, float none, Costs* costs) {
  const D d;
  for (std::size_t s = 0; s < graph.states.size(); ++s) {
    const StateGraph::State& state = graph.states[s];
    hn::Vec<D> least[kVectors];
    for (std::size_t v = 0; v < kVectors; ++v) {
      least[v] = state.home_term >= 0 ? hn::LoadU(d, term_costs[state.home_term].data() + v * kStep) : hn::Set(d, none);
    }
    for (std::int32_t e = state.first_edge; e < state.last_edge; ++e) {
      const float* term = term_costs[graph.edges[e].term].data();
      const float* rest = costs[graph.edges[e].to].data();
      for (std::size_t v = 0; v < kVectors; ++v) {
        const auto cost = hn::Add(hn::LoadU(d, term + v * kStep), hn::LoadU(d, rest + v * kStep));
        least[v] = hn::Min(least[v], cost);
      }
    }
    for (std::size_t v = 0; v < kVectors; ++v) hn::StoreU(least[v], d, costs[s].data() + v * kStep);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cortado
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cortado {

namespace {

HWY_EXPORT(PriceTerms);
HWY_EXPORT(CheapestFromStates);

}  // namespace

void price_terms(const TermTime* times, std::size_t count, const PriceSets& prices, Costs* costs) {
  HWY_DYNAMIC_DISPATCH(PriceTerms)(times, count, prices, costs);
}

void cheapest_from_states(const StateGraph& graph, const Costs* term_costs, float none, Costs* costs) {
  HWY_DYNAMIC_DISPATCH(CheapestFromStates)(graph, term_costs, none, costs);
}

}  // namespace cortado
#endif  // HWY_ONCE
