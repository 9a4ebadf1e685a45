// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "planner/search/state_graph.h"

#include <gtest/gtest.h>

#include "planner/search/brute_force_testing.h"

namespace cortado {
namespace {

std::int64_t count_paths(const StateGraph& graph) {
  std::vector<std::int64_t> paths;
  for (const StateGraph::State& state : graph.states) {
    std::int64_t count = state.home_term >= 0;
    for (std::int32_t e = state.first_edge; e < state.last_edge; ++e) count += paths[graph.edges[e].to];
    paths.push_back(count);
  }
  return paths.empty() ? 0 : paths.back();
}

// The numbers are those of Espresso's tree by encodes: 9, 236, 1152, 1920 and 1024 options.
TEST(StateGraph, PathsAreTheOptionsOfTheTree) {
  testing::RandomCase example = testing::random_case(1, 1, 2, {OpDevice::kCpu, OpDevice::kGpu});
  for (CodecTimes& times : example.cluster.codecs) times.codec = "topk(density=0.01)";
  const std::unique_ptr<Problem> problem = Problem::make(example.job, example.cluster, {}).value();
  const CodecCost* codec = &problem->codecs()[0];
  StateGraphs graphs(2);
  const auto paths = [&](const CodecCost* of, int max_encodes, int min_encodes) {
    return count_paths(graphs.get(problem->model(), of, max_encodes, min_encodes));
  };
  EXPECT_EQ(paths(codec, StateGraph::kUnlimited, 0), 4341);
  EXPECT_EQ(paths(codec, StateGraph::kUnlimited, 1), 4341 - 9);
  EXPECT_EQ(paths(codec, StateGraph::kUnlimited, 4), 1024);
  EXPECT_EQ(paths(codec, 2, 0), 9 + 236 + 1152);
  EXPECT_EQ(paths(codec, 1, 1), 236);
  EXPECT_EQ(paths(codec, 0, 1), 0);
  EXPECT_EQ(paths(nullptr, StateGraph::kUnlimited, 0), 9);
  EXPECT_LT(graphs.get(problem->model(), codec, StateGraph::kUnlimited, 0).states.size(), 400u);
}

}  // namespace
}  // namespace cortado
