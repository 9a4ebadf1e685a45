// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The decision tree of options (generate_options) as places and branches, so that it can be searched without being
// written down: from two paths that lead to the same place the same paths go on. Pure; any thread may use it.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "cortado/planner.h"

namespace cortado {

struct TreePlace {
  enum Phase : std::uint8_t {
    kFirst,       // the levels from `level` on are to be summed; the form may change before
    kFirstMoves,  // the same, but the next operation is a collective
    kSecond,      // the last first step is to be answered; the form may change before
    kSecondMoves,
    kLastDecode,
    kDone,
  };
  Phase phase = kFirst;
  bool encoded = false;
  std::uint8_t level = 0;
  std::uint8_t open_count = 0;                  // first steps that wait for their second one
  std::array<Operation, kMaxLevels> open = {};  // the second ones

  bool operator==(const TreePlace&) const = default;
};

struct TreeBranch {
  Operation operation;
  TreePlace to;
};

// Appends the branches of `from` to `branches`: none where an option is complete (kDone). Of at most kMaxLevels levels.
void append_branches(const OptionSpace& space, const TreePlace& from, std::vector<TreeBranch>* branches);

// All places that can be reached, with their branches: a few hundred where there are thousands of options. Place 0 is
// where every option begins.
struct TreeGraph {
  struct Edge {
    Operation operation;
    std::int32_t to = 0;
  };
  struct Place {
    bool is_done = false;
    std::vector<Edge> edges;
  };
  explicit TreeGraph(const OptionSpace& space);

  std::vector<Place> places;
};

}  // namespace cortado
