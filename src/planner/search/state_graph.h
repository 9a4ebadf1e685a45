// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The states that a bucket can be in on its way through the tree of options, and what leads from one to the other. Many
// paths of the tree lead to the same place in the same state and go on alike: a few hundred states where there are
// thousands of options. Which states there are depends on the ranks of the levels and on what a codec can do, not on
// sizes and times, so that they are found once.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "planner/cost/option_cost.h"
#include "planner/option_tree.h"

namespace cortado {

// States in an order in which each comes after those it leads to; the last one is where every option begins. No states:
// there is no option.
struct StateGraph {
  static constexpr int kUnlimited = 1 << 20;  // encodes

  // What has a time: an operation in a state. Some edges share one.
  struct Term {
    const Operation* operation = nullptr;  // nullptr: the way home
    PathState before;
  };
  struct Edge {
    std::int32_t to = 0;
    std::int32_t term = 0;
    const Operation* operation = nullptr;
  };
  struct State {
    std::int32_t first_edge = 0, last_edge = 0;  // [first, last) of edges
    std::int32_t home_term = -1;                 // of a complete option
  };

  std::vector<State> states;
  std::vector<Edge> edges;
  std::vector<Term> terms;
};

// The graphs of one topology, each made when it is asked for first. One thread at a time.
class StateGraphs {
 public:
  explicit StateGraphs(int levels);

  // `codec`: nullptr for options that do not encode. With `min_encodes` to `max_encodes` encodes. Lives as long as
  // this.
  const StateGraph& get(const CostModel& model, const CodecCost* codec, int max_encodes, int min_encodes);

 private:
  struct Known {
    std::array<int, 9> what;  // all that a graph depends on
    StateGraph graph;
  };

  int levels_;
  std::array<std::unique_ptr<TreeGraph>, 3> trees_;  // without encodes; payloads not summed; summed
  std::vector<std::unique_ptr<Known>> known_;
};

}  // namespace cortado
