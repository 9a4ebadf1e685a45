// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Topology: how the ranks of a job sit on machines and links. Levels go from the inside out; all groups of a level have
// the same number of ranks. A plain value: any thread may read it.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cortado/status.h"

namespace cortado {

struct TopologyLevel {
  std::string name;  // "intra", "inter" ...
  int ranks = 1;     // members of one group of this level

  bool operator==(const TopologyLevel&) const = default;
};

// A contiguous range of levels, both ends included. A collective over a range of levels runs among the ranks that
// differ in these levels only: over {0, 0} those of one machine, over all levels ("flat") all ranks.
struct LevelRange {
  int first = 0;
  int last = 0;

  bool operator==(const LevelRange&) const = default;
};

struct Topology {
  std::vector<TopologyLevel> levels;

  // Two levels: `ranks_per_machine` ranks on each machine, named intra and inter; one level, named all, if either
  // number is 1. Refuses a world size that is no multiple.
  static Result<Topology> two_levels(int world_size, int ranks_per_machine);

  // At least one level, at least one rank in each, names that are there and differ, fewer than 2^31 ranks in all.
  Status check() const;

  int world_size() const;

  // Ranks of one group of `range`.
  int group_size(LevelRange range) const;

  // Of `rank`: its place within its group of `range`, and the ranks of that group in order. The innermost level counts
  // fastest: rank = ((outer * ranks of the middle) + middle) * ranks of the inner + inner.
  int rank_in_group(int rank, LevelRange range) const;
  std::vector<int> group_of(int rank, LevelRange range) const;

  // "intra" for one level, "intra..inter" for several, "flat" for all levels of a topology that has several.
  std::string range_name(LevelRange range) const;
  Result<LevelRange> parse_range(const std::string& name) const;

  bool operator==(const Topology&) const = default;
};

// Where the launcher has put this process on its machine.
struct LauncherPlace {
  int rank_on_machine = 0;
  int ranks_on_machine = 1;

  bool operator==(const LauncherPlace&) const = default;
};

// From the variables that torchrun, Open MPI, MPICH and its relatives, or Slurm set; nothing if there are none of them.
// kInvalidArgument, with the variable and its value, where they make no sense. `variable` is std::getenv but in tests.
Result<std::optional<LauncherPlace>> launcher_place(const std::function<const char*(const char* name)>& variable =
                                                        [](const char* name) { return std::getenv(name); });

}  // namespace cortado
