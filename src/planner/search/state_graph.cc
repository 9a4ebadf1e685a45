// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "planner/search/state_graph.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory_resource>
#include <unordered_map>

namespace cortado {

namespace {

// What tells states at one place, or operations in a state, apart.
struct Key {
  std::array<std::int64_t, 4> words;

  bool operator==(const Key&) const = default;
};

struct KeyHash {
  std::size_t operator()(const Key& key) const {
    std::uint64_t hash = 0;
    for (const std::int64_t word : key.words) {
      hash = (hash ^ static_cast<std::uint64_t>(word)) * 0x9e3779b97f4a7c15ull;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

// `of`: what else there is to tell apart, in 48 bits.
Key key_of(const PathState& state, std::int64_t of) {
  const int small = state.parted << 4 | static_cast<int>(state.packing) << 2 | static_cast<int>(state.place) << 1 |
                    static_cast<int>(state.encoded);
  return {{state.parts, state.pieces, state.piece_parts, of << 16 | small}};
}

// Depth first.
class GraphBuilder {
 public:
  GraphBuilder(const OptionCost& cost, const CodecCost* codec, LevelRange all_levels, const TreeGraph& tree,
               int max_encodes, int min_encodes, StateGraph* graph)
      : cost_(cost),
        codec_(codec),
        all_levels_(all_levels),
        tree_(tree),
        max_encodes_(max_encodes),
        min_encodes_(min_encodes),
        graph_(*graph) {}

  void build() { add(cost_.begin(), 0, 0); }

 private:
  static constexpr std::int32_t kDeadEnd = -1;

  // Payloads. Those of low rank are summed over all levels at once, whatever the codec (sums_factors()).
  bool may_sum(const Operation& operation) const {
    return codec_->sums || (operation.kind == OpKind::kAllReduce && operation.levels == all_levels_);
  }

  // The number of a state. `encodes`: so far, counted as far as it matters.
  std::int32_t add(const PathState& state, std::int32_t place_number, int encodes) {
    const Key key = key_of(state, std::int64_t{encodes} << 24 | place_number);
    if (const auto known = numbers_.find(key); known != numbers_.end()) return known->second;
    const TreeGraph::Place& place = tree_.places[place_number];
    StateGraph::State added;
    const std::size_t first_edge = edges_.size();
    if (place.is_done && encodes >= min_encodes_) added.home_term = term_of(nullptr, state);
    for (const TreeGraph::Edge& edge : place.edges) {
      int with = encodes;
      if (edge.operation.kind == OpKind::kEncode) {
        if (encodes == max_encodes_) continue;
        with = max_encodes_ == StateGraph::kUnlimited ? std::min(encodes + 1, min_encodes_) : encodes + 1;
      }
      if (edge.operation.encoded && is_sum(edge.operation.kind) && !may_sum(edge.operation)) continue;
      PathState after = state;
      OperationSteps steps;
      if (!cost_.apply(edge.operation, &after, &steps)) continue;
      const std::int32_t to = add(after, edge.to, with);
      if (to != kDeadEnd) edges_.push_back({to, term_of(&edge.operation, state), &edge.operation});
    }
    if (edges_.size() == first_edge && added.home_term < 0) return numbers_[key] = kDeadEnd;
    added.first_edge = static_cast<std::int32_t>(graph_.edges.size());
    graph_.edges.insert(graph_.edges.end(), edges_.begin() + static_cast<std::ptrdiff_t>(first_edge), edges_.end());
    edges_.resize(first_edge);
    added.last_edge = static_cast<std::int32_t>(graph_.edges.size());
    graph_.states.push_back(added);
    return numbers_[key] = static_cast<std::int32_t>(graph_.states.size()) - 1;
  }

  std::int32_t term_of(const Operation* operation, const PathState& before) {
    std::int64_t what = 0;
    if (operation != nullptr) {
      what = 1 | static_cast<int>(operation->kind) << 1 | static_cast<int>(operation->device) << 9 |
             operation->levels.first << 10 | operation->levels.last << 18;
    }
    const auto [entry, is_new] =
        term_numbers_.try_emplace(key_of(before, what), static_cast<std::int32_t>(graph_.terms.size()));
    if (is_new) graph_.terms.push_back({operation, before});
    return entry->second;
  }

  const OptionCost& cost_;
  const CodecCost* codec_;
  const LevelRange all_levels_;
  const TreeGraph& tree_;
  int max_encodes_, min_encodes_;
  StateGraph& graph_;
  std::vector<StateGraph::Edge> edges_;  // of the states on the way, those of the last one at the end
  std::pmr::monotonic_buffer_resource memory_{1 << 16};
  std::pmr::unordered_map<Key, std::int32_t, KeyHash> numbers_{&memory_}, term_numbers_{&memory_};
};

}  // namespace

StateGraphs::StateGraphs(int levels) : levels_(levels) {}

const StateGraph& StateGraphs::get(const CostModel& model, const CodecCost* codec, int max_encodes, int min_encodes) {
  const int kind = codec == nullptr ? 0 : codec->traits.linear ? 2 : 1;
  std::array<int, 9> what = {kind, max_encodes, min_encodes, static_cast<int>(model.home)};
  if (codec != nullptr) {
    what[4] = codec->traits.low_rank;
    what[5] = codec->runs_on(OpDevice::kCpu);
    what[6] = codec->runs_on(OpDevice::kGpu);
    what[7] = codec->traits.elementwise;
    what[8] = codec->sums;
  }
  for (const std::unique_ptr<Known>& known : known_) {
    if (known->what == what) return known->graph;
  }
  std::unique_ptr<TreeGraph>& tree = trees_[kind];
  if (tree == nullptr) {
    OptionSpace space = {.levels = levels_, .sum_payloads = kind == 2};
    if (codec == nullptr) space.devices = {};
    tree = std::make_unique<TreeGraph>(space);
  }
  known_.push_back(std::make_unique<Known>());
  known_.back()->what = what;
  const OptionCost cost(model, codec, {.elems = 1});  // which states there are does not depend on it
  GraphBuilder(cost, codec, {0, levels_ - 1}, *tree, max_encodes, min_encodes, &known_.back()->graph).build();
  return known_.back()->graph;
}

}  // namespace cortado
